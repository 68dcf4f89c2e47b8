"""openai-python: OpenAI's own client."""

# /// script
# dependencies = ["openai==3.54.0"]
# ///

from __future__ import annotations

import json
from typing import Any

from cases import API_KEY, BASE_URL, MODEL, QUESTION, case, run
from openai import OpenAI

client = OpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0)
PROMPT = "def main(argv):\n"


def chat(**options: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=QUESTION, **{"max_tokens": 8, **options})  # type: ignore[arg-type]


@case("chat")
def _chat() -> None:
    answer = chat()
    assert answer.usage.completion_tokens >= 1
    assert answer.choices[0].message.role == "assistant"


@case("stream with usage")
def _stream() -> None:
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens >= 1


@case("completions")
def _completions() -> None:
    whole = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0).choices[0].text
    streamed = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole
    assert len(client.completions.create(model=MODEL, prompt=[PROMPT, "x"], max_tokens=2).choices) == 2


@case("n and seed")
def _choices() -> None:
    first, second = (chat(n=3, seed=5) for _ in range(2))
    assert len(first.choices) == 3
    assert [c.message.content for c in first.choices] == [c.message.content for c in second.choices]


@case("logprobs")
def _logprobs() -> None:
    (token, *_) = chat(logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert len(token.top_logprobs) == 3


@case("stop")
def _stop() -> None:
    text = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=30, temperature=0).choices[0].text
    cut = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=30, temperature=0, stop=text[10:14])
    assert cut.choices[0].text == text[: text.index(text[10:14])]


@case("json_schema")
def _json_schema() -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    assert set(json.loads(chat(response_format=form, max_tokens=200).choices[0].message.content)) == {"ok"}


@case("fields of other servers")
def _fields_of_others() -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=QUESTION,
        max_tokens=2,
        extra_body={"made_up": 1},  # type: ignore[arg-type]
    )
    assert raw.headers["X-Outrider-Ignored"] == "made_up"


@case("models")
def _models() -> None:
    assert MODEL in [model.id for model in client.models.list()]


if __name__ == "__main__":
    run("openai")
