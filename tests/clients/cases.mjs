// Cases of one client in JavaScript; see cases.py.
import { readFileSync } from "node:fs";

export const BASE_URL = process.env.BASE_URL ?? "http://127.0.0.1:8080/v1";
export const MODEL = process.env.MODEL ?? "reference";
export const API_KEY = process.env.API_KEY ?? "unused";
export const QUESTION = [{ role: "user", content: "What is 2 + 3?" }];

export function check(holds, otherwise) {
  if (!holds) throw new Error(otherwise);
}

// Returns a proof that holds at each daemon whose target calls functions, given its base URL; it names the format.
export function eachToolUrl(proof) {
  return async () => {
    for (const [name, url] of Object.entries(JSON.parse(process.env.TOOL_URLS))) {
      try {
        await proof(`${url}/v1`);
      } catch (error) {
        throw new Error(`${name}: ${error.message}`, { cause: error });
      }
    }
  };
}

// `cases` maps features to functions; the folder of the installed packages is in NODE_MODULES.
export async function run(name, cases) {
  const { version } = JSON.parse(readFileSync(`${process.env.NODE_MODULES}/${name}/package.json`));
  console.log(JSON.stringify({ version }));
  const wanted = process.argv.slice(2);
  for (const [feature, proof] of Object.entries(cases)) {
    if (wanted.length && !wanted.includes(feature)) continue;
    let reason = "";
    try {
      await proof();
    } catch (error) {
      console.error(error);
      reason = `${error.name}: ${error.message}`.split("\n")[0].slice(0, 160);
    }
    console.log(JSON.stringify({ feature, works: reason === "", reason }));
  }
  process.exit(0);
}
