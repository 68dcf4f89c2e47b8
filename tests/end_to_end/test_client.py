"""The client SDK against a real verifier: events, cancellation, deadlines, stop strings, errors that name a field."""

from __future__ import annotations

import asyncio
import gc
import math
import shutil

import pytest
from command_processes import free_port
from scripted_drafters import FailingDrafter, ScriptedDrafter

from outrider.edge import EdgeConfig, Finished, FinishReason, Provenance, SyncClient, Tokens
from outrider.edge.event_stream import collect
from outrider.proto.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    OutriderError,
    PromptTooLong,
    Unavailable,
    UnknownToken,
)
from outrider.proto.session import RetryRules
from outrider.proto.types import DraftToken, Patience

PROMPT = "def main(argv):\n"


@pytest.mark.usefixtures("all_drafts_pay")
async def test_events_carry_positions_provenance_log_probabilities_and_the_text(verifier, edge) -> None:
    patient = Patience(math.inf, 3)
    async with edge(verifier, drafter="general", patience=patient) as client:
        events = [event async for event in client.generate(PROMPT, max_tokens=40)]
        completion = await client.complete(PROMPT, max_tokens=40)
        position = len(client.encode(PROMPT))
    *tokens, end = events
    assert isinstance(end, Finished)
    for event in tokens:
        assert isinstance(event, Tokens)
        assert event.position == position
        assert len(event.tokens) == len(event.provenance) == len(event.pieces)
        assert all(token.logp <= 0 for token in event.tokens)
        position += len(event.ids)
    drafted = [p is Provenance.DRAFT for event in tokens for p in event.provenance]
    assert sum(drafted) == end.statistics.accepted > 0
    assert "".join(event.text for event in events) == completion.text
    assert end.reason is FinishReason.LENGTH
    assert len(drafted) == 40


async def test_the_synchronous_twin_says_the_same(verifier, edge, tokenizer_file) -> None:
    async with edge(verifier, drafter="none") as client:
        expected = await client.complete(PROMPT, max_tokens=12)

        def blocking() -> tuple[int, ...]:
            config = EdgeConfig(verifier=verifier, model="reference", tokenizer=tokenizer_file, drafter="ngram")
            with SyncClient(config) as twin:
                events = list(twin.generate(PROMPT, max_tokens=12))
                assert isinstance(events[-1], Finished)
                with pytest.raises(InvalidArgument, match="temperature"):
                    twin.complete(PROMPT, temperature=-1)
                return twin.complete(PROMPT, max_tokens=12).ids

        assert await asyncio.to_thread(blocking) == expected.ids


async def test_leaving_the_loop_cancels_the_text_at_the_verifier(edge) -> None:
    from outrider.cloud.serving.verifier_server import VerifierServer
    from outrider.cloud.verifier_config import VerifierConfig

    server = VerifierServer(VerifierConfig(threads=1))
    async with edge(await server.start(), drafter="general") as client:
        free = server.status().kv_pages_free
        events = client.generate(PROMPT, max_tokens=1000)
        await anext(events)
        assert server.status().sessions == 1
        assert server.status().kv_pages_free < free
        await events.aclose()
        for _ in range(200):
            if server.status().sessions == 0:
                break
            await asyncio.sleep(0.02)
        assert server.status().sessions == 0
        assert server.status().kv_pages_free == free
    await server.stop()


async def test_a_deadline_ends_the_text_and_what_came_before_it_is_kept(verifier, edge) -> None:
    async with edge(verifier, drafter="none") as client:
        got: list[int] = []
        deadline_s = 0.25
        while not got:  # a busy machine has no token before it
            deadline_s *= 2
            events = client.generate(PROMPT, max_tokens=2000, deadline_s=deadline_s)
            with pytest.raises(DeadlineExceeded, match="deadline_s"):
                await collect(events, lambda event: got.extend(event.ids))


async def test_eos_and_stop_tokens_end_the_text(verifier, edge) -> None:
    async with edge(verifier, drafter="general") as client:
        whole = await client.complete(PROMPT, max_tokens=40)
        stop = whole.ids[20]
        stopped = await client.complete(PROMPT, max_tokens=40, stop_tokens=(stop,))
        eos = await client.complete(PROMPT, max_tokens=40, allowed_tokens=(1,))
        ignored = await client.complete(PROMPT, max_tokens=5, allowed_tokens=(1,), ignore_eos=True)
    assert stopped.finish_reason is FinishReason.STOP_TOKEN
    assert stopped.ids == whole.ids[: whole.ids.index(stop) + 1]
    assert (eos.finish_reason, eos.ids) == (FinishReason.EOS, (1,))
    assert ignored.ids == (1,) * 5


async def test_what_only_the_verifier_can_refuse_is_refused_with_the_field_named(verifier, edge) -> None:
    async with edge(verifier, drafter="ngram") as client:
        for prompt, options, error, field in (
            ([8192], {}, UnknownToken, "open.prompt"),
            ([5] * 2048, {}, PromptTooLong, "open.prompt"),
            (PROMPT, {"stop_tokens": (9000,)}, UnknownToken, "sampling.stop_tokens"),
        ):
            with pytest.raises(error) as caught:
                await client.complete(prompt, **options)
            assert caught.value.field == field
            assert (await client.complete(PROMPT, max_tokens=3)).ids


async def test_an_unknown_model_and_a_silent_address_are_told_apart(verifier, edge, tokenizer_file) -> None:
    async with edge(verifier, drafter="none", model="other") as client:
        with pytest.raises(NotFound, match="reference"):
            await client.complete(PROMPT)
    retry, silent = RetryRules(abandon_after_s=0.5), f"127.0.0.1:{free_port()}"
    async with edge(silent, drafter="none", retry=retry, open_timeout_s=0.5) as client:
        with pytest.raises(Unavailable):
            await client.complete(PROMPT)


async def test_a_missing_drafter_names_those_that_there_are() -> None:
    from outrider.edge import Client

    with pytest.raises(OutriderError, match="general"):
        await Client(EdgeConfig(verifier="127.0.0.1:1", model="reference", drafter="nobody")).prepare()


async def test_a_tampered_drafter_package_leaves_cloud_streaming_and_a_warning(verifier, edge, tmp_path) -> None:
    from outrider.drafters.packages import FAMILY

    broken = tmp_path / "broken"
    shutil.copytree(FAMILY / "general", broken)
    model = broken / "model.onnx"
    model.write_bytes(model.read_bytes()[:-1] + b"x")

    async with edge(verifier, drafter=str(broken)) as client:
        completion = await client.complete(PROMPT, max_tokens=5)
    assert len(completion.ids) == 5
    assert "model.onnx" in completion.statistics.drafter_error


@pytest.mark.usefixtures("all_drafts_pay")
async def test_a_text_ends_for_the_same_reason_with_any_drafter(verifier, edge) -> None:
    async with edge(verifier, drafter="none") as client:
        prompt = client.encode(PROMPT)
        whole = await client.complete(PROMPT, max_tokens=12, ignore_eos=True)
        stops = [client.decode([token]) for token in whole.ids[-4:]]
        ends = [{"stop": stop} for stop in stops] + [{"stop_tokens": whole.ids[-1:]}, {"stop": "never said"}]
        expected = [await client.complete(PROMPT, max_tokens=12, ignore_eos=True, **end) for end in ends]
    oracle, patient = ScriptedDrafter([*prompt, *whole.ids]), Patience(math.inf, 16)
    async with edge(verifier, drafter=oracle, window=16, patience=patient) as client:
        got = [await client.complete(PROMPT, max_tokens=12, ignore_eos=True, **end) for end in ends]
    for plain, drafted in zip(expected, got, strict=True):
        assert (drafted.finish_reason, drafted.ids, drafted.text) == (plain.finish_reason, plain.ids, plain.text)
        assert drafted.statistics.steps <= 3, "one commit holds the end of a stop string and of the text"
    assert {completion.finish_reason for completion in got} >= {FinishReason.STOP_STRING, FinishReason.LENGTH}


class ForeignDrafter:
    """Somebody's drafter: proposes `token`, or raises it."""

    name, version = "foreign", "1"

    def __init__(self, token: int | Exception) -> None:
        self.token = token

    def open(self, rule):
        inner = ScriptedDrafter(lambda prefix: 5).open(rule)
        propose = inner.propose

        def foreign(n: int) -> tuple[DraftToken, ...]:
            if isinstance(self.token, Exception):
                raise self.token
            proposal = propose(n)
            return tuple(draft._replace(id=self.token) for draft in proposal)

        inner.propose = foreign
        return inner


async def test_whatever_a_drafter_does_the_text_goes_on(verifier, edge) -> None:
    async with edge(verifier, drafter="none") as client:
        expected = await client.complete(PROMPT, max_tokens=15)
    for drafter in (FailingDrafter(0), *map(ForeignDrafter, (IndexError("a bug"), 8192, -1, 1 << 40))):
        async with edge(verifier, drafter=drafter) as client:
            completion = await client.complete(PROMPT, max_tokens=15)
        assert completion.ids == expected.ids
        assert completion.statistics.drafter_error


def test_a_client_that_closes_right_after_its_last_text_leaves_nothing_behind(verifier, edge) -> None:
    complaints: list[dict] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        for _ in range(3):
            async with edge(verifier, drafter="general") as client:
                await client.complete(PROMPT, max_tokens=8)
            async with edge(verifier, drafter="general") as client:
                async for _ in client.generate(PROMPT, max_tokens=30):
                    break
        gc.collect()
        await asyncio.sleep(0.2)

    asyncio.run(main())
    assert not complaints


def test_the_synchronous_twin_raises_what_went_wrong_even_if_it_is_a_defect(tokenizer_file) -> None:
    with SyncClient(
        EdgeConfig(verifier="127.0.0.1:1", model="reference", tokenizer=tokenizer_file, drafter="none")
    ) as twin:

        async def broken(*_, **__):
            yield Tokens(0, (), (), ())
            raise IndexError("a defect")

        twin._client.generate = broken
        events = twin.generate(PROMPT)
        next(events)
        with pytest.raises(IndexError, match="a defect"):
            next(events)
