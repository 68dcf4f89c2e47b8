"""Schema of POST /v1/responses; its input is read by `items`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from outrider.edge.daemon.schema import Ignored, unless
from outrider.edge.daemon.strict import Strict, refuse, within
from outrider.proto.types import MAX_TOKEN_ID

MAX_METADATA = 16

_STATELESS = "send the conversation as input, or give previous_response_id"


def _input(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise refuse("must be a string or a list of items")
    return value


def _function(value: Any) -> Any:
    """Refuse a tool that is no function, whatever else it has."""
    if isinstance(value, dict) and isinstance(value.get("type"), str) and value["type"] != "function":
        raise refuse(f"is of type {value['type'][:40]!r}; there are only functions here, which your program runs")
    return value


class FunctionTool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def for_chat(self) -> dict[str, Any]:
        """The tool in the form of chats."""
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


class TextFormat(Strict):
    """Format that the text must have."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if self.type == "json_schema" and self.schema_ is None:
            raise refuse("schema is missing")
        return self

    @property
    def for_chat(self) -> dict[str, Any]:
        """The format as a chat's `response_format`."""
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name or "answer", "schema": self.schema_}}


class TextOptions(Strict):
    """Options of the text."""

    format: TextFormat | None = None
    verbosity: Ignored


class Reasoning(Strict):
    """Options of reasoning, which is a matter of the target's chat template."""

    effort: str | None = None
    summary: Ignored
    generate_summary: Ignored


class ResponsesRequest(Strict):
    """The body of POST /v1/responses."""

    model: Annotated[str, Field(min_length=1)]
    input: Annotated[Any, BeforeValidator(_input)]  # a string or a list of items
    instructions: str | None = None
    previous_response_id: Annotated[str | None, Field(max_length=200)] = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1, le=MAX_TOKEN_ID)] = None
    temperature: Annotated[float | None, within("temperature")] = None
    top_p: Annotated[float | None, within("top_p")] = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    include: list[str] | None = None
    text: TextOptions | None = None
    tools: list[Annotated[FunctionTool, BeforeValidator(_function)]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    metadata: Annotated[dict[str, str] | None, Field(max_length=MAX_METADATA)] = None
    truncation: Literal["auto", "disabled"] | None = None
    background: Annotated[Any, unless(False, why="is not supported here; leave it out, and stream")] = None
    conversation: Annotated[Any, unless(why=f"is not supported here; {_STATELESS}")] = None
    prompt: Annotated[Any, unless(why=f"is not supported here; {_STATELESS}")] = None
    # vLLM's
    seed: Annotated[int | None, Field(ge=-(1 << 63), lt=1 << 64)] = None
    top_k: Annotated[int | None, Field(ge=-1, le=MAX_TOKEN_ID)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    # OpenAI's book-keeping
    max_tool_calls: Ignored
    moderation: Ignored
    prompt_cache_key: Ignored
    prompt_cache_options: Ignored
    prompt_cache_retention: Ignored
    safety_identifier: Ignored
    service_tier: Ignored
    stream_options: Ignored
    user: Ignored

    @property
    def wants_logprobs(self) -> bool:
        """Whether the text comes with the log probabilities of its tokens."""
        return "message.output_text.logprobs" in (self.include or ()) or bool(self.top_logprobs)
