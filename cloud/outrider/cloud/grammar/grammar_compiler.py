"""Grammars compiled by llguidance, within its own limits, and tried in a child process first, which may be killed.

The library's limits do not bound everything: some schemas of 2 KB would take gigabytes and minutes all the same, and
the library ends the process that cannot give them. A grammar that has passed its trial takes no more beside the target.
The child is started by exec, since nothing may fork once gRPC or Ray is up; it reads a tokenizer and then grammars from
its standard input, a line of JSON each, and answers each.
"""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from outrider.proto.errors import InvalidArgument, Unavailable
from outrider.proto.types import Grammar, GrammarKind

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

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
TRIAL_S = 5.0  # of processor time; ordinary grammars take 1 to 50 ms
TIMEOUT_S = 30.0  # for a child that hardly gets a core
TRIAL_BYTES = 128 << 20  # beyond what the child takes with its tokenizer; ordinary grammars take 1 to 30 MB
START_S = 60.0
_NICENESS = 10  # the engine goes first


def make_tokenizer(tokenizer_json: str, vocab_size: int, eos_tokens: Collection[int]) -> LLTokenizer:
    """Build the trie of a tokenizer; raise `ValueError` where it cannot be read, and `ImportError`."""
    from llguidance import LLTokenizer

    return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=sorted(eos_tokens))


def compile_grammar(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
    """Return a matcher at the beginning of a text; InvalidArgument: the grammar is wrong, or costs too much."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(initial_lexer_fuel=LEXER_FUEL, max_lexer_states=LEXER_STATES, verbose_errors=False)
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
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if matcher.is_error():
        raise InvalidArgument(one_line(matcher.get_error()), field=FIELD)
    return matcher


def one_line(message: str) -> str:
    """Return llguidance's message without the quotation of the grammar that follows it."""
    lines = message.split("\n<non-verbose/>")[0].strip().split("\n")
    why = [line.removeprefix("error: ") for line in lines[1:] if line.startswith("error: ")]
    return " ".join([lines[0], *why])[:_MAX_OF_MESSAGE]


class TooCostly(InvalidArgument):
    """A grammar exceeds the time or the memory of a trial."""


class GrammarTrial:
    """A child process that compiles grammars for one tokenizer, one at a time; started when it is first needed."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_tokens: frozenset[int]) -> None:
        self._tokenizer = {"tokenizer": tokenizer_json, "vocab_size": vocab_size, "eos": sorted(eos_tokens)}
        self._child: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._closed = False

    def check(self, grammar: Grammar) -> None:
        """Compile a grammar within `TRIAL_S` seconds of processor time and `TRIAL_BYTES`.

        Raises:
            TooCostly: it takes more; the child has been killed.
            InvalidArgument: it is wrong.
            Unavailable: no child can be started.
        """
        child = self._running()
        answer = self._ask(child, {"kind": grammar.kind.name, "text": grammar.text}, TIMEOUT_S)
        if answer is None:
            self._end()
            self._refuse_if_closed()
            limits = f"{TRIAL_S:g} s or {TRIAL_BYTES >> 20} MiB"
            raise TooCostly(f"takes more than {limits} to compile; simplify it", field=FIELD)
        if answer["error"]:
            raise InvalidArgument(str(answer["error"]), field=FIELD)

    def close(self) -> None:
        """Kill the child; from any thread. A trial that runs ends with `Unavailable`."""
        self._closed = True
        self._end()

    def _running(self) -> subprocess.Popen[str]:
        with self._lock:
            self._refuse_if_closed()
            if self._child is not None and self._child.poll() is None:
                return self._child
            command = [sys.executable, "-m", __name__]
            pipe = subprocess.PIPE
            try:
                self._child = child = subprocess.Popen(  # noqa: S603 - this very file
                    command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, encoding="utf-8"
                )
            except OSError as error:
                raise Unavailable(f"no process compiles grammars: {error}", retry_after_s=1.0) from error
        if self._ask(child, self._tokenizer, START_S) is None:
            self._end()
            raise Unavailable("the process that compiles grammars does not start", retry_after_s=1.0)
        return child

    @staticmethod
    def _ask(child: subprocess.Popen[str], question: dict[str, Any], within_s: float) -> dict[str, Any] | None:
        """Return the child's answer; None: it ended without one, or was killed for its time."""
        assert child.stdin is not None  # noqa: S101 - both are pipes
        assert child.stdout is not None  # noqa: S101

        def kill() -> None:
            child.kill()
            child.wait()

        killer = threading.Timer(within_s, kill)
        killer.daemon = True
        killer.start()
        try:
            child.stdin.write(json.dumps(question) + "\n")
            child.stdin.flush()
            line = child.stdout.readline()
            return json.loads(line) if line.endswith("\n") else None
        except (OSError, ValueError):  # it has ended, or its pipes are closed
            return None
        finally:
            killer.cancel()
            killer.join()

    def _end(self) -> None:
        with self._lock:
            child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise Unavailable("the verifier stops", retry_after_s=0.1)


def main() -> None:
    """Serve one parent: compile what comes, until standard input ends."""
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    worker = threading.Thread(target=_serve)
    worker.start()
    worker.join()


def _serve() -> None:
    first = json.loads(sys.stdin.readline())
    tokenizer = make_tokenizer(first["tokenizer"], first["vocab_size"], first["eos"])
    with open("/proc/self/statm", encoding="ascii") as statm:
        address_space = int(statm.read().split()[0]) * resource.getpagesize()
    _limit(resource.RLIMIT_AS, address_space + TRIAL_BYTES)
    _answer("")
    for line in sys.stdin:
        question = json.loads(line)
        spent_s = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        _limit(resource.RLIMIT_CPU, math.ceil(spent_s + TRIAL_S))
        try:
            compile_grammar(Grammar(GrammarKind[question["kind"]], question["text"]), tokenizer).compute_bitmask()
        except InvalidArgument as error:
            _answer(error.message)
        else:
            _answer("")


def _limit(what: int, most: int) -> None:
    """Lower a soft limit; the hard one stays, so that the next grammar may have as much again."""
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _answer(error: str) -> None:
    print(json.dumps({"error": error}), flush=True)  # noqa: T201 - the parent reads it


if __name__ == "__main__":
    main()
