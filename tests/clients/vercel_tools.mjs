// Vercel AI SDK, tools: generateText and streamText with tools, by @ai-sdk/openai-compatible.
// dependencies = ["ai@6.0.326", "@ai-sdk/openai-compatible@2.0.92", "zod@4.6.7"]
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { API_KEY, MODEL, check, eachToolUrl, run } from "./cases.mjs";

const options = (url) => ({
  model: createOpenAICompatible({ name: "outrider", baseURL: url, apiKey: API_KEY })(MODEL),
  prompt: "Is it warm in Paris?",
  maxRetries: 0,
  stopWhen: stepCountIs(3),
  tools: {
    get_weather: tool({
      description: "Weather.",
      inputSchema: z.object({ city: z.string() }),
      execute: async ({ city }) => `warm in ${city}`,
    }),
  },
});

function expect(steps, text) {
  check(steps.length === 2 && steps[0].toolCalls[0].input.city === "Paris", `took ${steps.length} steps`);
  check(text === "It is said: warm in Paris", `said ${text}`);
}

await run("ai", {
  "generateText with tools": eachToolUrl(async (url) => {
    const { steps, text } = await generateText(options(url));
    expect(steps, text);
  }),
  "streamText with tools": eachToolUrl(async (url) => {
    const stream = streamText({ ...options(url), onError: ({ error }) => console.error(error) });
    const steps = await stream.steps;
    expect(steps, await stream.text);
  }),
});
