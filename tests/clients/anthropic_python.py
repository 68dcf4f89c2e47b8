"""anthropic-python: Anthropic's own client, at /v1/messages."""

# /// script
# dependencies = ["anthropic==2.12.0"]
# ///

from __future__ import annotations

import json
from typing import Any

from anthropic import Anthropic, BadRequestError, NotFoundError, beta_tool
from cases import API_KEY, BASE_URL, MODEL, QUESTION, case, each_tool_url, run

client = Anthropic(base_url=BASE_URL.removesuffix("/v1"), api_key=API_KEY, max_retries=0)


def say(**options: Any) -> Any:
    return client.messages.create(**{"model": MODEL, "max_tokens": 8, "messages": QUESTION, **options})


GREEDY = {"extra_body": {"temperature": 0.0}}  # which this client has no argument for


@case("message")
def _message() -> None:
    message = say(system="Be brief.", metadata={"user_id": "x"})
    assert (message.role, message.content[0].type) == ("assistant", "text")
    assert message.stop_reason in ("max_tokens", "end_turn")
    assert message.usage.output_tokens >= 1
    assert message._request_id in message.id


@case("stream")
def _stream() -> None:
    whole = say(**GREEDY)
    with client.messages.stream(model=MODEL, max_tokens=8, messages=QUESTION, **GREEDY) as stream:  # type: ignore[arg-type]
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


@case("turns of blocks")
def _turns() -> None:
    cached = {"type": "text", "text": "Add numbers.", "cache_control": {"type": "ephemeral"}}
    turns = [
        *QUESTION,
        {"role": "assistant", "content": [{"type": "text", "text": "5"}]},
        {"role": "user", "content": [{"type": "text", "text": "And 4 + 4?"}]},
    ]
    assert say(system=[cached], messages=turns).content[0].text


@case("stop_sequences")
def _stop_sequences() -> None:
    text = say(max_tokens=30, **GREEDY).content[0].text
    stop = text[3:6]
    cut = say(max_tokens=30, stop_sequences=["never said", stop], **GREEDY)
    assert cut.content[0].text == text[: text.index(stop)]
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)


@case("json_schema")
def _json_schema() -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    form = {"format": {"type": "json_schema", "schema": schema}}
    assert set(json.loads(say(output_config=form, max_tokens=200).content[0].text)) == {"ok"}


@case("count_tokens")
def _count_tokens() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=QUESTION)  # type: ignore[arg-type]
    usage = say().usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


@case("errors")
def _errors() -> None:
    for options, expected in (({"model": "claude"}, NotFoundError), ({"messages": []}, BadRequestError)):
        try:
            say(**options)
        except expected:
            continue
        raise AssertionError(f"{options} was taken")


WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Say what the weather is like in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
WARM = [{"role": "user", "content": "Is it warm in Paris?"}]


@case("tools")
@each_tool_url
def _tools(url: str) -> None:
    at = Anthropic(base_url=url.removesuffix("/v1"), api_key=API_KEY, max_retries=0)
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "tools": [WEATHER]}
    with at.messages.stream(messages=WARM, **asked) as stream:
        called = stream.get_final_message()
    (use,) = [block for block in called.content if block.type == "tool_use"]
    assert (use.name, use.input, called.stop_reason) == ("get_weather", {"city": "Paris"}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "warm"}
    turns: list[Any] = [*WARM, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    assert "warm" in at.messages.create(messages=turns, **asked).content[0].text


@case("tool runner")
@each_tool_url
def _tool_runner(url: str) -> None:
    @beta_tool
    def get_weather(city: str) -> str:
        """Say what the weather is like in a city."""
        return f"warm in {city}"

    at = Anthropic(base_url=url.removesuffix("/v1"), api_key=API_KEY, max_retries=0)
    runner = at.beta.messages.tool_runner(model=MODEL, max_tokens=200, messages=WARM, tools=[get_weather])
    assert "warm in Paris" in runner.until_done().content[0].text


if __name__ == "__main__":
    run("anthropic")
