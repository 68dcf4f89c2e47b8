// Vercel's ai SDK: ai with @ai-sdk/openai-compatible.
// dependencies = ["ai@6.0.326", "@ai-sdk/openai-compatible@2.0.92", "zod@4.6.7"]
import { generateObject, generateText, streamText } from "ai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { z } from "zod";
import { API_KEY, BASE_URL, MODEL, check, run } from "./cases.mjs";

const provider = createOpenAICompatible({
  name: "outrider",
  baseURL: BASE_URL,
  apiKey: API_KEY,
  supportsStructuredOutputs: true,
});
const asked = { model: provider(MODEL), prompt: "What is 2 + 3?", maxOutputTokens: 8, maxRetries: 0 };

await run("ai", {
  generateText: async () => {
    const { usage } = await generateText(asked);
    check(usage.outputTokens >= 1, "no tokens");
  },
  streamText: async () => {
    let text = "";
    for await (const piece of streamText(asked).textStream) text += piece;
    check(text.length > 0, "no text");
  },
  abort: async () => {
    const aborting = new AbortController();
    const { textStream } = streamText({ ...asked, maxOutputTokens: 1000, abortSignal: aborting.signal });
    for await (const _ of textStream) {
      aborting.abort();
      break;
    }
  },
  generateObject: async () => {
    const schema = z.object({ ok: z.boolean() });
    const { object } = await generateObject({ ...asked, maxOutputTokens: 200, schema });
    check(typeof object.ok === "boolean", "no boolean");
  },
});
