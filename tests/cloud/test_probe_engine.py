"""The engine of probes on a table: texts by our rule whatever is drafted, streamed, asked again or lost."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from probe_texts import KEYS, Inbox, ids, write
from small_verifier import Alternation, AtOnce
from table_server import CONTEXT, FACTS, VOCAB, TableServer, away, text_of

from outrider.cloud.grammar.grammar import GrammarMatcher
from outrider.cloud.probes.scoring import Probe
from outrider.cloud.serving.probe_engine import ProbeEngine
from outrider.cloud.target.backend import TargetFacts
from outrider.cloud.verifier_config import VerifierConfig
from outrider.proto.errors import ConfigError, Internal, InvalidArgument, OutriderError, Unavailable
from outrider.proto.session.verifier import Verified
from outrider.proto.types import (
    Cancel,
    Commit,
    CommittedToken,
    Continue,
    FinishReason,
    Grammar,
    GrammarKind,
    Open,
    Report,
    Sampling,
)

HASH, EOS, PROMPT = "0" * 64, frozenset({3}), (5, 6, 7)
TARGET = TargetFacts("", HASH, VOCAB, CONTEXT, EOS, 0, 0, torch.device("cpu"))
GREEDY = Sampling(max_tokens=40, ignore_eos=True)
SETTINGS = {
    "greedy": GREEDY,
    "greedy to its end": Sampling(max_tokens=120),
    "T 1": replace(GREEDY, temperature=1.0, seed=5),
    "T 0.7, top-k, top-p": replace(GREEDY, temperature=0.7, top_k=12, top_p=0.9, seed=6),
    "T 1.3, top-p": replace(GREEDY, temperature=1.3, top_p=0.95, seed=7),
    "min-p": replace(GREEDY, temperature=1.0, min_p=0.05, seed=8),
    "bias": replace(GREEDY, logit_bias=((9, 4.0), (11, -100.0))),
    "penalties": replace(GREEDY, temperature=0.5, presence_penalty=1.0, frequency_penalty=-0.3, seed=9),
    "no n-gram twice": replace(GREEDY, no_repeat_ngram_size=2),
    "few allowed": replace(GREEDY, temperature=1.0, allowed_tokens=(20, 21, 22, 23), seed=1),
    "at least some": Sampling(max_tokens=60, min_tokens=30),
}
Drafter = Callable[[list[CommittedToken], int], Sequence[int]]


def always(count: int) -> Drafter:
    """Draft what the text will be."""
    return lambda text, at: [token.id for token in text[at : at + count]]


def never(count: int) -> Drafter:
    """Draft what it will not be."""
    return lambda text, at: [(token.id + 1) % VOCAB for token in text[at : at + count]]


def mostly(count: int) -> Drafter:
    """Draft right but for every fourth position."""
    return lambda text, at: [
        token.id if (at + i) % 4 else (token.id + 1) % VOCAB for i, token in enumerate(text[at : at + count])
    ]


NOTHING = always(0)
DRAFTERS = {"none": always(0), "always": always(12), "never": never(5), "mostly": mostly(9)}


class Odd(Alternation):
    """The parser of a grammar that allows a few tokens in every row, none of them likely."""

    TOKENS = (20, 41, 62)

    def _allows(self, token: int) -> bool:
        return token in self.TOKENS

    def compute_bitmask(self) -> bytes:
        """Return a bit for each token."""
        return np.packbits(np.isin(np.arange(VOCAB), self.TOKENS), bitorder="little").tobytes()


class Bench:
    """An engine and the edges that use it."""

    def __init__(self, server: TableServer, **settings: object) -> None:
        config = VerifierConfig(engine="probes", target_url="http://127.0.0.1:9", draft_here="off", **settings)
        self.server = server
        self.engine = ProbeEngine(server, TARGET, replace(config, target_model="m"))
        self.keys = itertools.count()

    async def __aenter__(self) -> Bench:
        await self.engine.measure()
        self.engine.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.engine.stop)

    async def text(
        self,
        sampling: Sampling,
        draft: Drafter = NOTHING,
        known: list[CommittedToken] | None = None,
        **asked: object,
    ) -> tuple[list[CommittedToken], FinishReason | None]:
        """A text and its end; after each commit its edge drafts by what it knows of the text."""
        matcher = GrammarMatcher(Odd, VOCAB, EOS, AtOnce()) if sampling.grammar is not None else None
        known = text_of(PROMPT, sampling, EOS) if known is None else known
        return await write(self.engine, PROMPT, sampling, lambda at: draft(known, at), matcher=matcher, **asked)


@pytest.mark.parametrize("drafts", DRAFTERS)
@pytest.mark.parametrize("settings", SETTINGS)
async def test_a_text_is_that_of_the_rule_over_whole_rows(settings: str, drafts: str) -> None:
    sampling = SETTINGS[settings]
    expected = text_of(PROMPT, sampling, EOS)
    async with Bench(TableServer()) as bench:
        text, _ = await bench.text(sampling, DRAFTERS[drafts], expected)
    assert ids(text) == ids(expected)
    for token, said in zip(text, expected, strict=True):
        if token.logp is not None:
            assert token.logp == pytest.approx(said.logp, abs=1e-4)


async def test_a_grammar_holds_where_its_mask_leaves_nothing_of_a_list() -> None:
    sampling = Sampling(max_tokens=40, grammar=Grammar(GrammarKind.REGEX, "x"))
    expected = text_of(PROMPT, sampling, EOS, np.isin(np.arange(VOCAB), Odd.TOKENS))
    for facts in (FACTS, replace(FACTS, names=False, names_in_rows=False)):
        server = TableServer(facts)
        async with Bench(server) as bench:
            text, _ = await bench.text(sampling, always(6), expected)
        assert ids(text) == ids(expected)
        assert server.named if facts.names else server.longer


@pytest.mark.parametrize("names", [True, False])
async def test_open_rows_are_asked_for_by_name_or_by_a_longer_list(names: bool) -> None:
    sampling = replace(GREEDY, temperature=2.0, seed=4)
    server = TableServer(replace(FACTS, names=names, names_in_rows=False))
    async with Bench(server) as bench:
        text, _ = await bench.text(sampling, mostly(4))
    assert ids(text) == ids(text_of(PROMPT, sampling, EOS))
    assert server.named > 5 if names else server.longer > 5


async def test_the_loudest_tokens_in_a_probe_save_requests() -> None:
    sampling, named = replace(GREEDY, temperature=2.0, seed=4), []
    for in_rows in (False, True):
        server = TableServer(replace(FACTS, names_in_rows=in_rows))
        async with Bench(server) as bench:
            text, _ = await bench.text(sampling, mostly(4))
        assert ids(text) == ids(text_of(PROMPT, sampling, EOS))
        named.append(server.named)
    assert named[1] < named[0] / 2


async def test_stale_rows_make_another_text() -> None:
    async with Bench(TableServer(stale=True)) as bench:
        text, _ = await bench.text(SETTINGS["T 1"], always(6))
    assert ids(text) != ids(text_of(PROMPT, SETTINGS["T 1"], EOS))


async def test_drafts_that_hold_are_probed_and_useless_ones_leave_the_stream_alone() -> None:
    """A token of the stream takes 20 ms, a probe of 13 rows 33 ms or, where rows are dear, 410 ms."""
    for drafter, row_s, pays in ((always(12), 1e-3, True), (never(5), 1e-3, False), (mostly(12), 3e-2, False)):
        server = TableServer(step_s=0.02, row_s=row_s)
        async with Bench(server) as bench:
            streamed, probes = server.streamed, server.probes
            text, _ = await bench.text(GREEDY, drafter)
        assert ids(text) == ids(text_of(PROMPT, GREEDY, EOS))
        assert server.probes - probes <= 12
        assert (server.streamed - streamed < 12) is pays


class Pausing(TableServer):
    """Its first probe of drafts for a text takes half a second more."""

    paused = False

    async def probe(self, text: Sequence[int], drafts: Sequence[int], *how: Any, **named: Any) -> Probe:
        """Rows of the table."""
        if len(PROMPT) < len(text) < 16 and drafts and not self.paused:
            self.paused = True
            await asyncio.sleep(0.5)
        return await super().probe(text, drafts, *how, **named)


async def test_a_pause_of_the_server_is_no_price_of_rows() -> None:
    """An edge learns from these times what a row costs, and drafts little where it is dear."""
    verified, server = list[Verified](), Pausing(step_s=0.02, row_s=1e-3)
    async with Bench(server) as bench:
        note = bench.engine._note
        bench.engine._note = lambda slot, each, timing: (verified.append(each), note(slot, each, timing))  # type: ignore
        await bench.text(SETTINGS["T 1"], always(12))
    assert server.paused
    assert max(each.verify_s for each in verified) < 0.3
    assert max(each.queue_s for each in verified) > 0.3


@pytest.mark.parametrize(("logp", "rows"), [(False, 0), (True, 1)])
async def test_a_stream_has_rows_where_the_edge_wants_log_probabilities(logp: bool, rows: int) -> None:
    asked, server = list[int](), TableServer()
    stream = server.stream
    server.stream = lambda *how: (asked.append(how[3]), stream(*how))[1]  # type: ignore[method-assign]
    async with Bench(server) as bench:
        asked.clear()
        text, _ = await bench.text(GREEDY, logp=logp)
    assert ids(text) == ids(text_of(PROMPT, GREEDY, EOS))
    assert set(asked) == {rows}
    assert all((token.logp is not None) == logp for token in text)


async def test_a_text_begins_from_its_edges_hits_or_else_from_those_of_the_texts_before() -> None:
    async with Bench(TableServer(step_s=1e-3)) as bench:
        bench.engine.requests.usual.add(0.1)
        for told_after, begins in ((None, 0.1), (0, 0.9), (1, 0.9)):
            key, outbox = next(KEYS), Inbox()
            bench.engine.post_open(key, Open("m", HASH, PROMPT, GREEDY, f"s{key}"), outbox)
            for commits in range(3):
                if commits == told_after:
                    bench.engine.post_frame(key, Report(drafting=True, acceptance=0.9), lambda: None)
                while not isinstance(await outbox.queue.get(), Commit):
                    pass
            slot = bench.engine.sessions.get(key)
            assert slot is not None
            assert slot.session.acceptance == pytest.approx(begins)
            bench.engine.post_close(key)


async def test_texts_that_cannot_stream_are_probed_without_drafts() -> None:
    server = TableServer()
    async with Bench(server) as bench:
        streams = server.streams
        text, _ = await bench.text(SETTINGS["T 1"])
    assert server.streams == streams
    assert set(server.drafts[-len(text) :]) == {0}


async def test_log_probabilities_are_those_that_the_server_tells() -> None:
    for sampling, drafts in itertools.product((GREEDY, SETTINGS["T 1"]), (NOTHING, mostly(5))):
        expected = text_of(PROMPT, sampling, EOS)
        async with Bench(TableServer()) as bench:
            text, _ = await bench.text(sampling, drafts, expected, logprobs=True, top_logprobs=3)
        for token, said in zip(text, expected, strict=True):
            assert token.facts is not None
            assert said.facts is not None
            assert token.facts.logprob == pytest.approx(said.facts.logprob, abs=1e-5)
            assert token.facts.rank in (said.facts.rank, 0)
            assert [each for each, _ in token.facts.top] == [each for each, _ in said.facts.top]
            assert token.facts.entropy is None


async def test_many_texts_at_once_keep_apart() -> None:
    async with Bench(TableServer(step_s=1e-3)) as bench:
        settings = [*SETTINGS.values(), *SETTINGS.values()]
        drafters = itertools.cycle(DRAFTERS.values())
        texts = await asyncio.gather(*(bench.text(each, next(drafters)) for each in settings))
    assert [ids(text) for text, _ in texts] == [ids(text_of(PROMPT, each, EOS)) for each in settings]


@pytest.mark.parametrize("sampling", [GREEDY, SETTINGS["T 1"]], ids=["stream", "probes"])
async def test_a_text_that_loses_its_server_may_resume_and_goes_on_alike(sampling: Sampling) -> None:
    expected = text_of(PROMPT, sampling, EOS)
    server = TableServer(step_s=1e-3)
    async with Bench(server) as bench:
        key, outbox = next(bench.keys), Inbox()
        bench.engine.post_open(key, Open("m", HASH, PROMPT, sampling, "s"), outbox)
        text = list[CommittedToken]()
        while len(text) < 10:
            item = await outbox.queue.get()
            text += item.tokens if isinstance(item, Commit) else ()
        server.failures.append(away())
        while not isinstance(item := await outbox.queue.get(), OutriderError):
            text += item.tokens if isinstance(item, Commit) else ()
        assert isinstance(item, Unavailable)
        assert "does not answer" in item.message
        again, _ = await bench.text(sampling, committed=tuple(ids(text)))
        assert ids([*text, *again]) == ids(expected)
        assert bench.engine.metrics.counts.failed_steps == 1


async def test_answers_that_are_no_numbers_end_a_text_and_are_never_text() -> None:
    server = TableServer()
    async with Bench(server) as bench:
        server.failures.append(FloatingPointError("the server's log probabilities are no numbers"))
        with pytest.raises(Internal, match="no numbers"):
            await bench.text(SETTINGS["T 1"])
        assert ids((await bench.text(SETTINGS["T 1"]))[0]) == ids(text_of(PROMPT, SETTINGS["T 1"], EOS))


async def test_a_cancelled_text_ends_its_request_and_its_next_turn_is_its_own() -> None:
    server = TableServer(step_s=0.01)
    async with Bench(server) as bench:
        key, outbox = next(bench.keys), Inbox()
        bench.engine.post_open(key, Open("m", HASH, PROMPT, GREEDY, "s", keep_s=60.0), outbox)
        await outbox.queue.get()
        await outbox.queue.get()
        bench.engine.post_frame(key, Cancel(), lambda: None)
        while not (isinstance(item := await outbox.queue.get(), Commit) and item.finish is FinishReason.CANCELLED):
            assert isinstance(item, Commit)
        bench.engine.post_frame(key, Continue(len(PROMPT), (8,), replace(GREEDY, max_tokens=8), 9), lambda: None)
        text = list[CommittedToken]()
        while len(text) < 8:
            item = await outbox.queue.get()
            text += item.tokens if isinstance(item, Commit) else ()
        assert ids(text) == ids(text_of((*PROMPT, 8), replace(GREEDY, max_tokens=8), EOS))
        wrong = Continue(len(PROMPT), (8,), replace(GREEDY, repetition_penalty=1.2), 10)
        bench.engine.post_frame(key, wrong, lambda: None)
        while not isinstance(item := await outbox.queue.get(), OutriderError):
            pass
        assert isinstance(item, InvalidArgument)
        assert item.field == "sampling.repetition_penalty"
    assert server.closed


async def test_settings_that_a_server_cannot_keep_exact_are_refused_by_name() -> None:
    limited = TableServer(replace(FACTS, max_list=20, names=False, names_in_rows=False))
    async with Bench(limited) as bench:
        for sampling, field in (
            (replace(GREEDY, repetition_penalty=1.1), "repetition_penalty"),
            (replace(GREEDY, temperature=1.0), "temperature"),
            (replace(GREEDY, temperature=1.0, top_k=20), "top_k"),
            (replace(GREEDY, temperature=1.0, top_p=0.9), "top_p"),
        ):
            with pytest.raises(InvalidArgument, match=f"sampling.{field}"):
                await bench.text(sampling)
        text, _ = await bench.text(replace(GREEDY, temperature=1.0, top_k=19), always(5))
        assert ids(text) == ids(text_of(PROMPT, replace(GREEDY, temperature=1.0, top_k=19), EOS))


async def test_a_verifier_of_probes_needs_neither_torch_nor_ray() -> None:
    code = (
        "import sys; from outrider.cloud.serving.server_loading import load_probe_engine; "
        "from outrider.cloud.serving.verifier_server import VerifierServer; "
        "print([name for name in ('torch', 'ray', 'transformers') if name in sys.modules])"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert out.decode().strip() == "[]"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"engine": "probes"}, "target_url"),
        ({"target_url": "http://127.0.0.1:1"}, "target_url"),
        ({"engine": "probes", "target_url": "http://127.0.0.1:1", "learn": True}, "learn"),
        ({"engine": "probes", "target_url": "http://127.0.0.1:1", "dtype": "float32"}, "dtype"),
        ({"engine": "probes", "target_url": "http://127.0.0.1:1", "quantization": "fp8"}, "quantization"),
        ({"engine": "vllm", "target_model": "m"}, "target_model"),
    ],
)
def test_settings_of_another_engine_are_refused_by_name(given: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        VerifierConfig(**given)  # type: ignore[arg-type]
