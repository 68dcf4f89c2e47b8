"""Quiet streams change no text, whatever befalls them, and say to an observer how many beats they last alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from fleets import fleet, until

from outrider.cloud.serving.own_drafter import OwnDrafter
from outrider.drafters import NgramDrafter
from outrider.edge import Sampling
from outrider.proto import codec
from outrider.proto.errors import InvalidArgument
from outrider.proto.session.quiet_wire import ends_at_beat
from outrider.proto.types import Open

WAYS = {
    "greedy": Sampling(max_tokens=20),
    "sampled": Sampling(max_tokens=20, temperature=1.0, seed=20260),
}
BEAT = {"quiet_beat_s": 0.02}


class Wire:
    """Sizes of the messages each way, in one process with both ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.up, self.down, self.opens = list[int](), list[int](), list[int]()
        for name, sizes in (
            ("encode_edge_cell", self.up),
            ("encode_cloud_cell", self.down),
            ("padded_edge_frame", self.opens),
        ):
            monkeypatch.setattr(codec, name, self._counted(getattr(codec, name), sizes))

    def _counted(self, encode: Any, sizes: list[int]) -> Any:
        def counted(*arguments: Any) -> bytes:
            data: bytes = encode(*arguments)
            sizes.append(len(data))
            return data

        return counted

    def check(self, streams: int) -> None:
        assert len(set(self.up)) == len(set(self.down)) == len(set(self.opens)) == 1
        assert len(self.opens) == streams


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    return Wire(monkeypatch)


@pytest.mark.parametrize("drafter", ["none", "general,ngram"])
async def test_the_text_is_the_same_and_one_stream_is_like_any_other(serving, edge, prompts, wire, drafter) -> None:
    async with serving(**BEAT) as address:
        for prompt in prompts(1)[:2]:
            for way in WAYS.values():
                async with edge(address, drafter="none") as client:
                    expected = await client.complete(prompt.text, way)
                async with edge(address, drafter=drafter, quiet_wire=True) as client:
                    found = await client.complete(prompt.text, way)
                assert (found.ids, found.finish_reason) == (expected.ids, expected.finish_reason)
                assert [token.logp for token in found.tokens] == [token.logp for token in expected.tokens]
                assert ends_at_beat(len(wire.down))
                assert len(wire.down) - 2 <= len(wire.up) <= len(wire.down)  # the last answers may meet the end
                wire.check(streams=1)
                for sizes in (wire.up, wire.down, wire.opens):
                    sizes.clear()


async def test_the_text_is_the_same_with_drafts_of_both_ends(edge, prompts, drafting, wire) -> None:
    prompt = prompts(1)[0]
    async with drafting(lambda _: OwnDrafter(NgramDrafter(), 8192), **BEAT) as (address, _):
        for way in WAYS.values():
            async with edge(address, drafter="none", drafts_here=0) as client:
                expected = await client.complete(prompt.text, way)
            async with edge(address, drafter="general,ngram", quiet_wire=True) as client:
                assert (await client.complete(prompt.text, way)).ids == expected.ids
    wire.check(streams=2)


async def test_the_text_survives_cut_streams(serving, edge, relay, prompts, wire) -> None:
    prompt, way = prompts(1)[0], WAYS["sampled"]
    async with serving(name="a", **BEAT) as first, serving(name="b", **BEAT) as second:
        async with edge(first, drafter="none") as client:
            expected = await client.complete(prompt.text, way)
        async with (
            relay(first) as one,
            relay(second) as two,
            edge(one.address, two.address, drafter="general", quiet_wire=True) as client,
        ):
            got: list[int] = []
            async for event in client.generate(prompt.text, way):
                if hasattr(event, "reason"):
                    assert event.statistics.resumes >= 2
                    continue
                got += event.ids
                if len(got) > 4 and one.cuts + two.cuts < 2:
                    one.cut()
                    two.cut()
    assert tuple(got) == expected.ids
    assert len(set(wire.up)) == len(set(wire.down)) == 1


async def test_a_text_that_is_left_goes_on_as_cells_and_frees_its_slot(serving, edge, prompts, wire) -> None:
    async with serving(max_sessions=1, **BEAT) as address, edge(address, drafter="none", quiet_wire=True) as client:
        running = client.generate(prompts(1)[0].text, max_tokens=400, ignore_eos=True)
        await anext(running)
        await running.aclose()
        at_once = len(wire.down)
        again = await asyncio.wait_for(client.complete("Once", max_tokens=2), 60)
        assert again.ids
    assert at_once < 16, "it was left early"
    assert len(wire.down) == 32, "two streams, each of the fewest beats"
    wire.check(streams=len(wire.opens))  # one more where the slot was not free yet


async def test_a_text_that_is_left_before_its_verifier_answers_is_cancelled_there(serving, edge, prompts, wire) -> None:
    async with serving(max_sessions=1, **BEAT) as address, edge(address, drafter="none", quiet_wire=True) as client:
        waiting = asyncio.create_task(client.complete(prompts(1)[0].text, max_tokens=1000, ignore_eos=True))
        await until(lambda: wire.opens)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.wait_for(client.complete("Once", max_tokens=2), 60)
    assert len(wire.down) == 32, "two streams, each of the fewest beats"


async def test_the_text_is_the_same_through_a_relay_of_the_coordinator(tmp_path) -> None:
    async with fleet("a", verifier=BEAT, relay=True) as found:
        async with found.client(tmp_path) as client:
            expected = await client.complete("Once upon a time", max_tokens=12)
        async with found.client(tmp_path, quiet_wire=True) as client:
            assert (await client.complete("Once upon a time", max_tokens=12)).ids == expected.ids


async def test_turns_of_a_conversation_open_a_quiet_stream_each(serving, edge, wire) -> None:
    async with serving(**BEAT) as address:
        said = []
        for quiet in (False, True):
            async with (
                edge(address, drafter="ngram", quiet_wire=quiet) as client,
                client.conversation(max_tokens=8) as talk,
            ):
                said.append([(await talk.complete(text)).ids for text in ("Once upon", " and then")])
    assert said[0] == said[1]
    wire.check(streams=2)


async def test_a_quiet_text_may_ask_for_a_service(serving, edge, prompts, wire) -> None:
    prompt, way = prompts(1)[0], WAYS["sampled"]
    async with serving(**BEAT) as address:
        async with edge(address, drafter="none") as client:
            expected = await client.complete(prompt.text, way)
        async with edge(address, drafter="general,ngram", quiet_wire=True) as client:
            found = await client.complete(prompt.text, way, service={"gap_ms": 60_000})
    assert found.ids == expected.ids
    record = found.statistics.service
    assert record is not None
    assert record.gaps == record.kept > 0
    wire.check(streams=1)


async def test_a_verifier_that_knows_no_quiet_streams_is_refused(serving, edge, monkeypatch) -> None:
    decode = codec.decode_edge_frame

    def of_old(data: bytes, *limits: int) -> Any:
        frame = decode(data, *limits)
        return replace(frame, quiet=None) if isinstance(frame, Open) else frame

    monkeypatch.setattr(codec, "decode_edge_frame", of_old)
    async with serving() as address, edge(address, drafter="none", quiet_wire=True) as client:
        with pytest.raises(InvalidArgument, match="--quiet-wire"):
            await client.complete("Once", max_tokens=4)
