// npm openai: OpenAI's client for JavaScript.
// dependencies = ["openai@6.49.0"]
import OpenAI from "openai";
import { API_KEY, BASE_URL, MODEL, QUESTION, check, run } from "./cases.mjs";

const client = new OpenAI({ baseURL: BASE_URL, apiKey: API_KEY, maxRetries: 0 });
const asked = { model: MODEL, messages: QUESTION, max_tokens: 8 };

await run("openai", {
  chat: async () => {
    const answer = await client.chat.completions.create(asked);
    check(answer.usage.completion_tokens >= 1, "no tokens");
  },
  "stream with usage": async () => {
    const stream = await client.chat.completions.create({
      ...asked,
      stream: true,
      stream_options: { include_usage: true },
    });
    let last;
    for await (const chunk of stream) last = chunk;
    check(last.usage.completion_tokens >= 1, "no usage in the last chunk");
  },
  abort: async () => {
    const stream = await client.chat.completions.create({ ...asked, max_tokens: 1000, stream: true });
    for await (const _ of stream) break;
    stream.controller.abort();
  },
});
