"""Grammars compiled by llguidance, within its own limits.

Those limits do not bound everything: some schemas of 2 KB would take minutes and gigabytes all the same.
`grammar_trial.py` compiles each grammar where that does no harm, before it is compiled beside a target.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from outrider.proto.errors import InvalidArgument
from outrider.proto.types import Grammar, GrammarKind

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

FIELD = "sampling.grammar"
# llguidance descends into a chain of rules by recursion: 64 KiB of them need 20 MB. Reserved, not used.
STACK_BYTES = 256 << 20
# At the library's own limits one mask may take 1 s and 200 MB, with these 0.3 s and 50 MB; ordinary ones take 0.1 ms.
LEXER_FUEL = 250_000
LEXER_STATES = 50_000
# Between the parts of JSON: a space, or a new line and its indentation, as all writers of JSON have it. With anything
# more a model that likes blanks goes on with them until its tokens are spent. A schema's own `x-guidance` wins.
_BLANKS = r" |\n[ \t]{0,32}"
_ANY_OBJECT = '{"type":"object"}'
_MAX_OF_MESSAGE = 300


def make_tokenizer(tokenizer_json: str, vocab_size: int, eos_tokens: Collection[int]) -> LLTokenizer:
    """Build the trie of a tokenizer; raise `ValueError` where it cannot be read, and `ImportError`."""
    from llguidance import LLTokenizer

    return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=sorted(eos_tokens))


def compile_grammar(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
    """Return a matcher at the beginning of a text.

    Raises:
        InvalidArgument: the grammar is wrong, or exceeds what llguidance may spend on it.
    """
    from llguidance import LLMatcher

    try:
        match grammar.kind:
            case GrammarKind.JSON_OBJECT:
                source = LLMatcher.grammar_from_json_schema(_ANY_OBJECT, defaults={"whitespace_pattern": _BLANKS})
            case GrammarKind.JSON_SCHEMA:
                blanks = None if '"x-guidance"' in grammar.text else _BLANKS
                source = LLMatcher.grammar_from_json_schema(grammar.text, defaults={"whitespace_pattern": blanks})
            case GrammarKind.REGEX:
                source = LLMatcher.grammar_from_regex(grammar.text)
            case GrammarKind.LARK:
                source = LLMatcher.grammar_from_lark(grammar.text)
    except ValueError as error:
        raise InvalidArgument(one_line(str(error)), field=FIELD) from error
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=_limits())
    if matcher.is_error():
        raise InvalidArgument(one_line(matcher.get_error()), field=FIELD)
    return matcher


def one_line(message: str) -> str:
    """Return llguidance's message without the quotation of the grammar that follows it."""
    lines = message.split("\n<non-verbose/>")[0].strip().split("\n")
    why = [line.removeprefix("error: ") for line in lines[1:] if line.startswith("error: ")]
    return " ".join([lines[0], *why])[:_MAX_OF_MESSAGE]


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(initial_lexer_fuel=LEXER_FUEL, max_lexer_states=LEXER_STATES, verbose_errors=False)
