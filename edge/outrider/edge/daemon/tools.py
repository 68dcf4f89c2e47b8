"""Functions that a chat's model may call: whether the target knows of any, and what a request makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from outrider.drafters.token_text import special_tokens
from outrider.edge.chat.template import TemplateSource
from outrider.edge.daemon.errors import ApiError
from outrider.edge.daemon.schema import ChatRequest
from outrider.edge.daemon.tool_schema import NO_PARAMETERS, Tool, ToolChoice
from outrider.edge.tool_calls.formats import AUTO, FORMATS, ToolFormat, format_of, knows_tools
from outrider.edge.tool_calls.grammar import CallableFunction, CallRules, grammar_of
from outrider.edge.tool_calls.parts import CallParser
from outrider.proto.errors import InvalidArgument
from outrider.proto.types import Grammar, GrammarKind

_GIVE = "give --tool-format to `outrider edge` if it speaks one of " + ", ".join(FORMATS)


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """Tools of one target.

    Attributes:
        format: format in which it calls functions; None: it cannot, or nobody knows.
        why_not: reason for that, and the remedy.
        template: the chat template's text for chats with tools.
        special: tokens of the format's markers that texts would leave out, by marker.
    """

    format: ToolFormat | None = None
    why_not: str = "has no chat template"
    template: str = ""
    special: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, source: TemplateSource | None, tokenizer: Tokenizer, name: str = AUTO) -> ToolSupport:
        """Find out by a chat template, and the operator's `--tool-format`."""
        if source is None:
            return NO_TOOLS
        template = source.with_tools or source.text
        if not knows_tools(template):
            return cls(why_not="has a chat template that shows no tools to the model; leave tools out")
        spoken = format_of(template) if name == AUTO else FORMATS[name]
        if spoken is None:
            return cls(why_not=f"writes its calls in a format that its chat template does not tell; {_GIVE}")
        left_out = special_tokens(tokenizer)
        tokens = {marker: tokenizer.token_to_id(marker) for marker in spoken.markers}
        special = {marker: token for marker, token in tokens.items() if token in left_out}
        return cls(spoken, "", template, special)


NO_TOOLS = ToolSupport()


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools of one request.

    Attributes:
        format: format of the calls.
        tools: functions that the model is shown.
        shown: special tokens that the text must show, for its calls to be found.
        grammar: grammar of the text; None: the model writes what it likes.
    """

    format: ToolFormat
    tools: tuple[Tool, ...]
    shown: frozenset[int]
    grammar: Grammar | None

    def parser(self) -> CallParser:
        """Return the parser of one text."""
        return self.format.parser({tool.function.name for tool in self.tools})

    def new_id(self) -> str:
        """Return the id of a new call."""
        return self.format.new_id()


def tool_use(request: ChatRequest, support: ToolSupport, model: str) -> ToolUse | None:
    """Return a request's tools; None: it has none, or the model shall not call them.

    Raises:
        ApiError: 400, the target cannot call functions.
    """
    if not request.tools or (request.tool_choice is not None and request.tool_choice.mode == "none"):
        return None
    if support.format is None:
        raise ApiError(400, f"tools: {model} {support.why_not}", param="tools", code="tools_not_supported")
    grammar = _grammar(request, request.tools, support, support.format.name)
    return ToolUse(support.format, tuple(request.tools), frozenset(support.special.values()), grammar)


def _grammar(request: ChatRequest, tools: list[Tool], support: ToolSupport, format_name: str) -> Grammar | None:
    """Return the grammar that holds a text to what its request says about calls; None: it leaves all to the model."""
    choice = request.tool_choice or ToolChoice(mode="auto")
    answer = request.response_format.schema_of_answer if request.response_format else None
    must_call, one = choice.mode == "required", request.parallel_tool_calls is False
    strict = any(tool.function.strict for tool in tools)
    if not (must_call or one or strict or answer is not None or choice.names is not None):
        return None
    functions = [tool.function for tool in tools if choice.names is None or tool.function.name in choice.names]
    rules = CallRules(
        functions=[
            CallableFunction(function.name, function.parameters or NO_PARAMETERS, bool(function.strict))
            for function in functions
        ],
        must_call=must_call,
        max_calls=1 if one else None,
        answer=answer,
        special=support.special,
        template=support.template,
    )
    try:
        return Grammar(GrammarKind.LARK, grammar_of(format_name, rules))
    except InvalidArgument as error:
        message = f"tools: the grammar of their calls {error.message}; give fewer tools, or simpler schemas"
        raise ApiError(400, message, param="tools") from error
