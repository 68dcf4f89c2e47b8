"""vLLM's extras: fields of vLLM's server, sent by openai-python as its users send them."""

# /// script
# dependencies = ["openai==3.54.0"]
# ///

from __future__ import annotations

import json
from typing import Any

from cases import API_KEY, BASE_URL, MODEL, case, run
from openai import BadRequestError, OpenAI

client = OpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0)
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
SCHEMA["additionalProperties"] = False


def text(max_tokens: int = 200, **extra: Any) -> str:
    raw = client.completions.with_raw_response.create(
        model=MODEL, prompt="x", max_tokens=max_tokens, temperature=0, extra_body=extra
    )
    assert "X-Outrider-Ignored" not in raw.headers
    return raw.parse().choices[0].text


@case("ignore_eos with min_tokens")
def _ignore_eos() -> None:
    assert text(20, ignore_eos=True, min_tokens=20, stop_token_ids=[])


@case("structured_outputs")
def _structured_outputs() -> None:
    assert text(structured_outputs={"choice": ["yes", "no"]}) in ("yes", "no")
    assert text(structured_outputs={"regex": "[0-9]{3}"}).isdigit()
    assert text(structured_outputs={"grammar": 'start: "a" "b"'}) == "ab"
    assert set(json.loads(text(structured_outputs={"json": SCHEMA}))) == {"ok"}


@case("guided_json/regex/choice/grammar")
def _guided() -> None:
    assert text(guided_choice=["yes", "no"]) in ("yes", "no")
    assert text(guided_regex="[0-9]{3}").isdigit()
    assert text(guided_grammar='start: "a" "b"') == "ab"
    assert set(json.loads(text(guided_json=SCHEMA))) == {"ok"}


@case("chat_template_kwargs")
def _chat_template_kwargs() -> None:
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert client.chat.completions.create(**asked, extra_body={"chat_template_kwargs": {"enable_thinking": False}})


@case("continuous_usage_stats")
def _continuous_usage() -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.completions.create(model=MODEL, prompt="x", max_tokens=8, stream=True, stream_options=options)
    assert all(chunk.usage for chunk in stream)


@case("skip_special_tokens and cache_prompt")
def _without_effect() -> None:
    text(2, skip_special_tokens=True, spaces_between_special_tokens=True, cache_prompt=True)


@case("echo")
def _echo() -> None:
    assert text(2, echo=True).startswith("x")


@case("min_tokens")
def _min_tokens() -> None:
    asked: Any = {"model": MODEL, "prompt": "x", "max_tokens": 40, "temperature": 0}
    reply = client.completions.create(**asked, extra_body={"min_tokens": 40})
    assert reply.usage
    assert (reply.usage.completion_tokens, reply.choices[0].finish_reason) == (40, "length")


@case("prompt_logprobs")
def _prompt_logprobs() -> None:
    raw = client.completions.with_raw_response.create(
        model=MODEL, prompt="x = y", max_tokens=1, extra_body={"prompt_logprobs": 2}
    )
    first, *others = raw.http_response.json()["choices"][0]["prompt_logprobs"]
    assert first is None
    assert all(2 <= len(entries) <= 3 for entries in others)


@case("echo with logprobs")
def _echo_logprobs() -> None:
    answer = client.completions.create(model=MODEL, prompt="x = y", max_tokens=1, logprobs=2, echo=True)
    said = answer.choices[0].logprobs
    assert said.token_logprobs[0] is None
    assert all(logprob <= 0 for logprob in said.token_logprobs[1:])
    only = client.completions.create(model=MODEL, prompt="x = y", max_tokens=0, logprobs=2, echo=True).choices[0]
    assert (only.text, only.logprobs.token_logprobs) == ("x = y", said.token_logprobs[:-1])


@case("suffix")
def _suffix() -> None:
    refused(suffix="x")


def refused(**extra: Any) -> None:
    """Fail with the server's reason, which is the table's."""
    try:
        text(2, **extra)
    except BadRequestError as error:
        message = error.body["message"]  # type: ignore[index]
        raise NotImplementedError(message.removeprefix(f"{error.param}: ")) from None


if __name__ == "__main__":
    run("openai")
