"""Schema of POST /v1/messages and /v1/messages/count_tokens; contents are read by `content`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from outrider.edge.daemon.schema import MAX_MESSAGES, Ignored, Stops, unless
from outrider.edge.daemon.strict import Strict, refuse, within
from outrider.proto.types import MAX_TOKEN_ID


def _function(value: Any) -> Any:
    """Refuse a tool that Anthropic runs, whatever else it has."""
    if isinstance(value, dict) and value.get("type", "custom") not in ("custom", None):
        raise refuse(f"is of type {str(value['type'])[:40]!r}; there are only tools here that your program runs")
    return value


class ClientTool(Strict):
    """A tool that the client runs."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    allowed_callers: Ignored
    cache_control: Ignored
    defer_loading: Ignored
    eager_input_streaming: Ignored
    input_examples: Ignored

    @property
    def for_chat(self) -> dict[str, Any]:
        """The tool in the form of chats."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.input_schema}}


class ChoiceOfTool(Strict):
    """Whether the model uses tools, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @property
    def for_chat(self) -> Any:
        """The choice in the form of chats."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name or ""}}
        return "required" if self.type == "any" else self.type


class OutputFormat(Strict):
    """Format that the text must have."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    """Options of the text."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountRequest(Strict):
    """The body of POST /v1/messages/count_tokens: what becomes of the prompt."""

    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[list[Any], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[Any] | None = None
    tools: list[Annotated[ClientTool, BeforeValidator(_function)]] | None = None
    tool_choice: ChoiceOfTool | None = None
    output_config: OutputConfig | None = None
    thinking: Ignored
    # Anthropic's book-keeping
    cache_control: Ignored
    context_management: Ignored
    speed: Ignored


class MessagesRequest(CountRequest):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN_ID)]
    stream: bool | None = None
    stop_sequences: Stops = None
    temperature: Annotated[float | None, within("temperature", high=1.0)] = None
    top_p: Annotated[float | None, within("top_p")] = None
    top_k: Annotated[int | None, Field(ge=0, le=MAX_TOKEN_ID)] = None
    seed: Annotated[int | None, Field(ge=-(1 << 63), lt=1 << 64)] = None  # vLLM's
    thread: Any = None
    container: Annotated[Any, unless()] = None
    mcp_servers: Annotated[Any, unless([])] = None
    # Anthropic's book-keeping
    inference_geo: Ignored
    metadata: Ignored
    service_tier: Ignored
