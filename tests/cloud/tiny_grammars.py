"""Grammars on a vocabulary of four tokens, three pieces of words and EOS, with matchers that answer at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from outrider.cloud.grammar.grammar import GrammarMatcher, Grammars
from outrider.proto.types import Grammar

PIECES = ("a", "b", "ab")
EOS = 3
VOCAB = 4
PROMPT = (1, 0, 1)


class Inline(Executor):
    """Does the work at once."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


def tiny_tokenizer() -> str:
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(PIECES)}, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return tokenizer.to_str()


TINY = Grammars(tiny_tokenizer(), VOCAB, frozenset({EOS}))


def matcher_of(
    grammar: Grammar, kind: type[GrammarMatcher] = GrammarMatcher, committed: tuple[int, ...] = ()
) -> GrammarMatcher:
    matcher = kind(lambda: TINY._matcher(grammar), VOCAB, frozenset({EOS}), Inline())
    matcher.resume(list(committed))
    return matcher
