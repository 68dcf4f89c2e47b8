"""Schema of requests: OpenAI's fields, and vLLM's extras.

Fields for what this daemon does not do (`audio`, `suffix`, …) are refused unless they ask for nothing. What becomes of
unknown fields is decided in `body_reading`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from outrider.edge.daemon.http_errors import from_outrider
from outrider.proto.errors import InvalidArgument
from outrider.proto.types import BOUNDS, MAX_TOKEN_ID, MAX_TOP_LOGPROBS, Grammar, GrammarKind, ServiceGoal

MAX_TOOLS = 128
MAX_DEPTH = 100  # of schemas and arguments
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
MAX_WORDS = 1024  # to choose one of
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")
_TOKEN_KEY = re.compile("0|[1-9][0-9]{0,9}")  # in one way alone, so that no token is named twice
_GBNF = re.compile(r"^\s*root\s*::=", re.MULTILINE)
MAX_CHOICES = 128
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 4096
MAX_MESSAGES = 4096
_OLD = "is OpenAI's old form, which is not supported here; use {}"


class Strict(BaseModel):
    """No conversions, no NaN, and no unknown fields: `body_reading` takes them out first where they may be there.

    Attributes:
        ignored: known fields that change nothing here, such as other servers' book-keeping.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True, protected_namespaces=())
    ignored: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _without_ignored(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: field for name, field in value.items() if name not in cls.ignored}


def refuse(message: str) -> PydanticCustomError:
    """Return the error of a value that is refused, for pydantic's validators; `message` goes on after the field."""
    return PydanticCustomError("refused", "{why}", {"why": message})


def within(name: str, high: float | None = None) -> AfterValidator:
    """Return a validator that keeps a number in the HTTP range of `BOUNDS[name]`, or below `high` where an API's is."""
    bounds = BOUNDS[name].of_http
    if high is not None:
        bounds = replace(bounds, high=high)

    def check(value: float | None) -> float | None:
        if value is not None and not bounds.allows(value):
            raise refuse(f"must be in {bounds}")
        return value

    return AfterValidator(check)


def _shallow(value: Any) -> Any:
    """Refuse JSON that is nested too deeply for all that walks through it later."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for each in level for inner in _inside(each)]
        if not level:
            return value
    raise refuse(f"is nested deeper than {MAX_DEPTH} levels; make it flatter")


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


class Function(Strict):
    """A function that the model may call; without `parameters` it takes none."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, BeforeValidator(_shallow)] = None
    strict: bool | None = None


class Tool(Strict):
    """A tool, which is always a function here."""

    type: Literal["function"]
    function: Function

    @property
    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates know it, its keys in the order of transformers' own schemas."""
        function = self.function
        described = {} if function.description is None else {"description": function.description}
        parameters = NO_PARAMETERS if function.parameters is None else function.parameters
        return {"type": "function", "function": {"name": function.name, **described, "parameters": parameters}}


class ToolChoice(Strict):
    """Whether the model calls functions, and which: `names`, or all where that is None."""

    mode: Literal["none", "auto", "required"]
    names: list[str] | None = None


def as_choice(value: Any) -> Any:
    """Return the fields of a `ToolChoice` that OpenAI's forms stand for."""
    match value:
        case None | ToolChoice():
            return value
        case "none" | "auto" | "required":
            return {"mode": value}
        case {"type": "function", "function": {"name": str(name)}}:
            return {"mode": "required", "names": [name]}
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(tools)}}:
            if not tools:
                raise refuse("allows no tools; use 'none'")
            return {"mode": mode, "names": [_allowed(tool) for tool in tools]}
    forms = "'none', 'auto', 'required', {'type': 'function', 'function': {'name': …}} or an object of allowed_tools"
    raise refuse(f"must be {forms}")


def _allowed(tool: Any) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise refuse("has an allowed tool that is not {'type': 'function', 'function': {'name': …}}")


def _arguments(value: Any) -> Any:
    """Return the arguments of a call as templates want them: an object, which OpenAI writes as a string of JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else {}
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, dict):
        raise refuse("must be a JSON object, as a string")
    return _shallow(value)


class Called(Strict):
    """The function of a call and its arguments, which become an object."""

    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_arguments)]


class ToolCall(Strict):
    """A call in an earlier turn of the assistant."""

    ignored = frozenset({"index"})  # some clients leave it from the stream
    id: str
    type: Literal["function"] = "function"
    function: Called


Words = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_WORDS)]


def _schema(value: Any) -> Any:
    """Return a JSON schema as text."""
    if isinstance(value, dict | bool):
        return json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str):
        raise refuse("must be a JSON schema, as an object or as text")
    return value


def _lark(value: Any) -> Any:
    if isinstance(value, str) and _GBNF.search(value):
        raise refuse("is in GBNF; grammars here are in Lark, and llguidance's gbnf_to_lark translates them")
    return value


SchemaText = Annotated[str | None, BeforeValidator(lambda value: None if value is None else _schema(value))]
Lark = Annotated[str | None, BeforeValidator(_lark)]


class GivenGrammar(NamedTuple):
    """A grammar as a request gives it, and the name of the field that does."""

    field: str
    kind: GrammarKind
    text: str

    def grammar(self) -> Grammar:
        """Return the grammar for the verifier; raise `ApiError` 400 where it is empty or too long."""
        try:
            return Grammar(self.kind, self.text)
        except InvalidArgument as error:
            raise from_outrider(error, self.field) from error


class StructuredOutputs(Strict):
    """vLLM's `structured_outputs`: the grammar of an answer, in one of these notations."""

    json_: Annotated[SchemaText, Field(alias="json")] = None
    regex: str | None = None
    choice: Words | None = None
    grammar: Lark = None
    json_object: bool | None = None

    def sources(self) -> list[GivenGrammar]:
        """Return the grammars that are given, of which a request may have one."""
        made = sources_of("structured_outputs.", self.json_, self.regex, self.choice, self.grammar)
        any_object = GivenGrammar("structured_outputs.json_object", GrammarKind.JSON_OBJECT, "")
        return [*made, *([any_object] if self.json_object else [])]


def sources_of(
    prefix: str, schema: str | None, regex: str | None, choice: list[str] | None, lark: str | None
) -> list[GivenGrammar]:
    """Return a grammar for each notation that is not None; the names of all their fields begin with `prefix`."""
    words = None if choice is None else "|".join(map(_escaped, choice))
    kinds = (
        ("json", GrammarKind.JSON_SCHEMA, schema),
        ("regex", GrammarKind.REGEX, regex),
        ("choice", GrammarKind.REGEX, words),
        ("grammar", GrammarKind.LARK, lark),
    )
    return [GivenGrammar(prefix + name, kind, text) for name, kind, text in kinds if text is not None]


def _escaped(word: str) -> str:
    """Return a regular expression for exactly these characters; Python's escapes are not all those of llguidance."""
    return _SPECIAL.sub(lambda match: "\\" + match.group(), word)


def unless(*trivial: Any, why: str = "is not supported here; leave it out") -> BeforeValidator:
    """Return a validator of an unsupported field: it takes null and the `trivial` values, which change nothing."""

    def check(value: Any) -> Any:
        if value is None or any(type(value) is type(nothing) and value == nothing for nothing in trivial):
            return value
        raise refuse(why)

    return BeforeValidator(check)


def _prompt(value: Any) -> Any:
    """Return the prompts, each a string or a list of token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(entry, str) for entry in value):
            return value
        if all(map(_is_token, value)):
            return [value]
        if all(isinstance(entry, list) and all(map(_is_token, entry)) for entry in value):
            return value
    raise refuse("must be a string, a list of strings, a list of token ids, or a list of such lists")


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKEN_ID


def _token_key(key: str) -> str:
    if not _TOKEN_KEY.fullmatch(key):
        raise refuse("is not a token id; give it as a decimal string without leading zeros")
    return key


def _content(value: Any) -> Any:
    """Return a message's text: a string, or text parts joined by newlines."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refuse("must be a string or a list of parts")
    return "\n".join(_part(part) for part in value)


def _part(part: Any) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise refuse("holds a part that is no object with a type")
    if part["type"] not in ("text", "refusal"):
        raise refuse(f"holds a part of type {part['type'][:40]!r}; this target reads text only")
    text = part.get(part["type"])
    if not isinstance(text, str):
        raise refuse(f"holds a part of type {part['type']!r} without its {part['type']!r}")
    return text


def _predicted(value: Any) -> Any:
    """Return a prediction's text: a string, or text parts as they follow each other."""
    if isinstance(value, list):
        if any(isinstance(part, dict) and part.get("type") == "refusal" for part in value):
            raise refuse("holds a part of type 'refusal'; give text")
        return "".join(_part(part) for part in value)
    if not isinstance(value, str):
        raise refuse("must be a string or a list of parts")
    return value


def _for_template(value: Any) -> Any:
    own = {"messages", "tools", "add_generation_prompt"} & set(value if isinstance(value, dict) else ())
    if own:
        raise refuse(f"holds {min(own)!r}, which the request itself gives; leave it out")
    return value


def _service(value: Any) -> ServiceGoal | None:
    try:
        return None if value is None else ServiceGoal.parse(value)
    except InvalidArgument as error:
        raise refuse(error.message) from error


ServiceField = Annotated[ServiceGoal | None, BeforeValidator(_service)]
_NO_SUFFIX = "is not supported here: models have their own notations for a gap; write the prompt in that of the model"
Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]] | None,
    Field(max_length=MAX_STOPS),
    BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
TokenKey = Annotated[str, AfterValidator(_token_key)]


class StreamOptions(Strict):
    """Options that only streams heed; `include_speculation` is our own, `continuous_usage_stats` vLLM's."""

    ignored = frozenset({"include_obfuscation"})
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_speculation: bool | None = None


class JsonSchema(Strict):
    """A JSON schema that the answer follows, as OpenAI's `response_format.json_schema` names it."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Strict):
    """Format that an answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise refuse("json_schema must be there exactly where type is 'json_schema'")
        if self.json_schema is not None and self.json_schema.schema_ is None:
            raise refuse("json_schema.schema is missing")
        return self

    @property
    def schema_of_answer(self) -> dict[str, Any] | bool | None:
        """The schema of an answer in this format; None: it is text."""
        if self.type == "text":
            return None
        return {"type": "object"} if self.json_schema is None else self.json_schema.schema_


class Prediction(Strict):
    """A text that the answer may repeat; `content` becomes a string."""

    type: Literal["content"]
    content: Annotated[str, BeforeValidator(_predicted)]


class Message(Strict):
    """One turn of a chat."""

    ignored = frozenset({"annotations"})
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_content)] = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ToolCall] | None, Field(max_length=MAX_TOOLS)] = None
    refusal: str | None = None
    reasoning_content: str | None = None
    audio: Annotated[Any, unless()] = None
    function_call: Annotated[Any, unless(why=_OLD.format("tool_calls"))] = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and (self.role != "assistant" or not (self.tool_calls or self.refusal)):
            raise refuse("content is missing")
        return self


class Request(Strict):
    """Fields that both endpoints share."""

    ignored = frozenset(
        (
            *("metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier"),
            *("service_tier", "store", "user"),
            *("guided_decoding_backend", "spaces_between_special_tokens"),  # vLLM's
            "cache_prompt",  # llama.cpp's, which is as if true
        )
    )
    model: Annotated[str, Field(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int | None, Field(ge=1, le=MAX_CHOICES)] = None
    max_tokens: Annotated[int | None, Field(ge=1, le=MAX_TOKEN_ID)] = None
    temperature: Annotated[float | None, within("temperature")] = None
    top_p: Annotated[float | None, within("top_p")] = None
    seed: Annotated[int | None, Field(ge=-(1 << 63), lt=1 << 64)] = None
    stop: Stops = None
    presence_penalty: Annotated[float | None, within("presence_penalty")] = None
    frequency_penalty: Annotated[float | None, within("frequency_penalty")] = None
    logit_bias: dict[TokenKey, Annotated[float, within("logit_bias")]] | None = None
    response_format: ResponseFormat | None = None
    service: ServiceField = None  # our own
    # vLLM's
    top_k: Annotated[int | None, Field(ge=-1, le=MAX_TOKEN_ID)] = None
    min_p: Annotated[float | None, within("min_p")] = None
    repetition_penalty: Annotated[float | None, within("repetition_penalty")] = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    min_tokens: Annotated[int | None, Field(ge=0, le=MAX_TOKEN_ID)] = None
    no_repeat_ngram_size: Annotated[int | None, within("no_repeat_ngram_size")] = None  # of transformers
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaText = None
    guided_regex: str | None = None
    guided_choice: Words | None = None
    guided_grammar: Lark = None
    prompt_logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None
    skip_special_tokens: Annotated[Any, unless(True, why="must be true: special tokens are no part of a text")] = None

    @model_validator(mode="after")
    def _prompt_logprobs_come_at_once(self) -> Self:
        if self.stream and self.prompt_logprobs is not None:
            raise refuse("prompt_logprobs does not go with stream; leave one out")
        return self

    @model_validator(mode="after")
    def _one_grammar(self) -> Self:
        fields = [source.field for source in self.grammars()]
        if len(fields) > 1:
            raise refuse(f"{' and '.join(fields)} give more than one grammar; give one")
        return self

    def grammars(self) -> list[GivenGrammar]:
        """Return the grammars of the answer, at most one of them in a request that was checked."""
        made = sources_of("guided_", self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        if self.structured_outputs is not None:
            made += self.structured_outputs.sources()
        form = self.response_format
        if form is not None and form.json_schema is not None:
            schema = json.dumps(form.json_schema.schema_, ensure_ascii=False)
            made.append(GivenGrammar("response_format", GrammarKind.JSON_SCHEMA, schema))
        elif form is not None and form.type == "json_object":
            made.append(GivenGrammar("response_format", GrammarKind.JSON_OBJECT, ""))
        return made

    @property
    def choices(self) -> int:
        """Number of texts for each prompt."""
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        """Whether every chunk of a stream has the usage so far; only with `wants_usage`."""
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def wants_speculation(self) -> bool:
        """Whether a stream says what became of the drafts."""
        return bool(self.stream_options and self.stream_options.include_speculation)


class ChatRequest(Request):
    """The body of POST /v1/chat/completions."""

    ignored = Request.ignored | {"moderation"}
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int | None, Field(ge=1, le=MAX_TOKEN_ID)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    reasoning_effort: str | None = None
    prediction: Prediction | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, BeforeValidator(_for_template)] = None
    tools: Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(as_choice)] = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[Any, unless([], why=_OLD.format("tools"))] = None
    function_call: Annotated[Any, unless("none", "auto", why=_OLD.format("tool_choice"))] = None
    modalities: Annotated[Any, unless(["text"], why="asks for more than text, all that there is here")] = None
    audio: Annotated[Any, unless()] = None
    web_search_options: Annotated[Any, unless()] = None

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise refuse("top_logprobs needs logprobs = true")
        return self

    @model_validator(mode="after")
    def _chooses_among_its_tools(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise refuse(f"tools has two functions named {twice!r}; give each its own name")
        choice = self.tool_choice
        if choice is not None and choice.mode == "required" and not names:
            raise refuse("tool_choice asks for a call, but there are no tools; give tools")
        missing = next((name for name in (choice and choice.names) or () if name not in names), None)
        if missing is not None:
            raise refuse(f"tool_choice names {missing[:100]!r}, which is not among tools")
        return self

    @model_validator(mode="after")
    def _goes_with_prediction(self) -> Self:
        """Refuse what OpenAI refuses beside a prediction, so that a request means the same on both sides."""
        if self.prediction is None:
            return self
        beside = {
            "n": self.choices > 1,
            "logprobs": self.logprobs,
            "presence_penalty": (self.presence_penalty or 0) > 0,
            "frequency_penalty": (self.frequency_penalty or 0) > 0,
            "max_completion_tokens": self.max_completion_tokens is not None,
            "tools": bool(self.tools),
        }
        refused = next((name for name, given in beside.items() if given), None)
        if refused is not None:
            instead = "use max_tokens" if refused == "max_completion_tokens" else "leave one of them out"
            raise refuse(f"{refused} does not go with prediction; {instead}")
        return self


class CompletionRequest(Request):
    """The body of POST /v1/completions; `prompt` becomes a list of strings or of lists of token ids."""

    prompt: Annotated[list[str] | list[list[int]], BeforeValidator(_prompt)]
    logprobs: Annotated[int | None, Field(ge=0, le=5)] = None
    max_tokens: Annotated[int | None, Field(ge=0, le=MAX_TOKEN_ID)] = None
    echo: bool | None = None
    suffix: Annotated[Any, unless("", why=_NO_SUFFIX)] = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _answers_something(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise refuse("max_tokens must be 1 or more without echo = true")
        return self

    @model_validator(mode="after")
    def _best_of_all(self) -> Self:
        if self.best_of is not None and self.best_of != self.choices:
            raise refuse("best_of is not supported here beyond n; ask for n texts and take the best")
        if len(self.prompt) * self.choices > MAX_CHOICES:
            raise refuse(f"prompt and n ask for more than {MAX_CHOICES} texts at once")
        return self
