// Server-sent events: the JSON of each `data:` field of a response, as it comes, until `[DONE]`.

export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).replace(/\r\n?/g, "\n").split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const data = dataOf(block);
        if (data === "[DONE]") {
          yield { done: true };
          return;
        }
        if (data) yield { json: JSON.parse(data) };
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // leaving early lets the daemon free the session
  }
}

function dataOf(block) {
  return block
    .split("\n")
    .filter((line) => line.startsWith("data:"))
    .map((line) => line.slice(5).replace(/^ /, ""))
    .join("\n");
}
