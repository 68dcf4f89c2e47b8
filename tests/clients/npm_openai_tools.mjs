// npm openai, tools: `runTools` of OpenAI's client for JavaScript.
// dependencies = ["openai@6.49.0"]
import OpenAI from "openai";
import { API_KEY, MODEL, check, eachToolUrl, run } from "./cases.mjs";

const city = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const asked = {
  model: MODEL,
  messages: [{ role: "user", content: "Is it warm in Paris?" }],
  tools: [
    {
      type: "function",
      function: {
        name: "get_weather",
        parameters: city,
        parse: JSON.parse,
        function: ({ city }) => `warm in ${city}`,
      },
    },
  ],
};

const answered = (options) =>
  eachToolUrl(async (url) => {
    const client = new OpenAI({ baseURL: url, apiKey: API_KEY, maxRetries: 0 });
    const content = await client.chat.completions.runTools({ ...asked, ...options }).finalContent();
    check(content === "It is said: warm in Paris", `said ${content}`);
  });

await run("openai", { runTools: answered({}), "streamed runTools": answered({ stream: true }) });
