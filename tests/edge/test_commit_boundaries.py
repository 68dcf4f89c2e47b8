"""A text is the same wherever its commits are cut: its tokens, their pieces, the end and the reason for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_cloud import EOS, scripted_client
from tokenizers import Tokenizer

from outrider.cloud.models.family_index import target_folder, tokenizer_file
from outrider.edge import Finished, FinishReason, Tokens
from outrider.edge.decoding import Observer
from outrider.proto.session import Done
from outrider.proto.types import CommittedToken, TokenFacts

FILE = tokenizer_file(target_folder("reference"))
TOKENIZER = Tokenizer.from_file(str(FILE))
PROMPT = (11, 12, 13)
BEYOND = (9,) * 99  # the script goes on after the end


class Ends(Observer):
    """Notes how texts end."""

    def __init__(self) -> None:
        self.seen: list[Done | None] = []

    def ended(self, done: Done | None, at: float) -> None:
        self.seen.append(done)


@dataclass(frozen=True)
class Text:
    """All of a text that its user sees but the grouping of its events.

    Attributes:
        ended: reason that observers see, such as metrics and traces.
    """

    tokens: tuple[CommittedToken, ...]
    pieces: tuple[str, ...]
    rest: str
    reason: FinishReason
    ended: FinishReason | None

    @property
    def written(self) -> str:
        return "".join(self.pieces) + self.rest


def ids_of(written: str) -> list[int]:
    return TOKENIZER.encode(written, add_special_tokens=False).ids


class Setting:
    """One client, whose scripted texts are decoded one after the other."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self.client, self._channels = scripted_client(FILE)

    def decode(self, ids: list[int], sizes: Sequence[int] = (), *, paced: bool = True, **options: Any) -> Text:
        """Decode these tokens in commits of these sizes; each has log probabilities of its own."""
        whole = [*ids, *BEYOND]
        scripted = [
            CommittedToken(token, None, TokenFacts(-0.25 * at, 1, ((token, -0.25 * at),)))
            for at, token in enumerate(whole)
        ]
        self._channels.script, self._channels.sizes, self._channels.paced = lambda _: scripted, sizes, paced
        return self._runner.run(asyncio.wait_for(self._decode(options), 120))

    async def _decode(self, options: dict[str, Any]) -> Text:
        observer = Ends()
        tokens: list[CommittedToken] = []
        pieces: list[str] = []
        async for event in self.client.generate(PROMPT, observer=observer, logprobs=True, top_logprobs=1, **options):
            if isinstance(event, Tokens):
                assert event.position == len(PROMPT) + len(tokens)
                assert len(event.tokens) == len(event.pieces) == len(event.provenance) > 0
                tokens += event.tokens
                pieces += event.pieces
        assert isinstance(event, Finished)
        (done,) = observer.seen
        return Text(tuple(tokens), tuple(pieces), event.text, event.reason, done and done.finish)


@pytest.fixture(scope="module")
def cloud() -> Iterator[Setting]:
    with asyncio.Runner() as runner:
        made = Setting(runner)
        yield made
        runner.run(made.client.close())


def expected(ids: list[int], stop: list[str], stop_tokens: tuple[int, ...], max_tokens: int) -> tuple[Any, ...]:
    """Follow a text token by token: its ids, its text, and the reason for its end."""
    for n, last in enumerate([*ids, *BEYOND], 1):
        kept = [*ids, *BEYOND][:n]
        written = TOKENIZER.decode(kept, skip_special_tokens=True)
        found = [at for string in stop if (at := written.find(string)) >= 0]
        if found:
            return kept, written[: min(found)], FinishReason.STOP_STRING
        for ends, reason in [
            (last == EOS, FinishReason.EOS),
            (last in stop_tokens, FinishReason.STOP_TOKEN),
            (n == max_tokens, FinishReason.LENGTH),
        ]:
            if ends:
                return kept, written, reason
    raise AssertionError("the text has no end")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_text_is_the_same_wherever_its_commits_are_cut(cloud, data) -> None:
    written = data.draw(st.text(alphabet="ab c\n🦉é", min_size=1, max_size=24), label="written")
    ids = ids_of(written)
    if data.draw(st.booleans(), label="EOS"):
        ids.insert(data.draw(st.integers(0, len(ids)), label="at"), EOS)
    part = st.tuples(st.integers(0, len(written) - 1), st.integers(1, 5)).map(lambda at: written[at[0] :][: at[1]])
    stop = data.draw(st.lists(part | st.text("abx", min_size=1, max_size=3), max_size=2, unique=True), label="stop")
    stop_tokens = tuple(data.draw(st.lists(st.sampled_from(ids), max_size=1), label="stop tokens"))
    options = {"stop": stop, "stop_tokens": stop_tokens, "max_tokens": data.draw(st.integers(1, len(ids) + 2))}
    text = cloud.decode(ids, **options)
    assert ([token.id for token in text.tokens], text.written, text.reason) == expected(ids, **options)
    assert text.ended is text.reason
    sizes = tuple(data.draw(st.lists(st.integers(1, 8), max_size=len(ids)), label="sizes"))
    assert cloud.decode(ids, sizes, paced=data.draw(st.booleans(), label="paced"), **options) == text


def test_every_way_to_cut_a_text_gives_the_same(cloud) -> None:
    ids = [*ids_of("a bc🦉"), EOS]
    assert len(ids) >= 7
    options = {"stop": ["bc", "c🦉"], "max_tokens": 7}
    text = cloud.decode(ids, **options)
    for cuts in range(1 << 6):
        sizes = [1]
        for position in range(6):
            if cuts >> position & 1:
                sizes.append(1)
            else:
                sizes[-1] += 1
        assert cloud.decode(ids, tuple(sizes), paced=False, **options) == text


def test_a_stop_string_that_only_the_whole_text_holds_is_the_reason_too(cloud) -> None:
    ids = ids_of("a🦉")[:3]  # half a character, which is written as U+FFFD at the end
    text = cloud.decode(ids, stop="\N{REPLACEMENT CHARACTER}", max_tokens=3)
    assert (text.written, text.reason) == ("a", FinishReason.STOP_STRING)
