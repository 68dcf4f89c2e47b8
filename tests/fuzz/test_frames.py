"""Damaged frames: refused by name, without a trace in other sessions; and the checks that say so can fail."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import machines_under_fire
import pytest
from machines_under_fire import EdgeUnderFire, HonestSession, VerifierUnderFire
from recorded_streams import recorded_stream
from run_frames import Part, fire_at_machines, fire_at_verifier, hostile_streams

from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.verifier_config import VerifierConfig
from outrider.proto import codec
from outrider.proto.types import Continue, Draft, Open


def test_recorded_streams_hold_every_kind_of_frame() -> None:
    sent, received = recorded_stream(1)
    kinds = {type(codec.decode_edge_frame(data)) for data in sent}
    assert {Open, Continue, Draft} <= kinds
    assert {type(codec.decode_cloud_frame(data)).__name__ for data in received} == {"Opened", "Commit"}


def test_damaged_streams_change_no_text_and_leave_the_session_beside_them_exact() -> None:
    part = fire_at_machines(3000, seed=5)
    assert part.check() == []
    assert part.honest_texts > 5
    assert part.outcomes["InvalidArgument"] > 20
    assert part.outcomes["went on"] > 5


def test_hostile_streams_are_refused_by_name_and_honest_texts_are_exact(tmp_path, caplog) -> None:
    streams = hostile_streams(tmp_path, seed=20)
    config = VerifierConfig(target=str(tmp_path), dtype="float32", threads=1, kv_tokens=16384, max_sessions=64)

    async def fire() -> Any:
        server = VerifierServer(config)
        streams.address = await server.start()
        try:
            await streams.run(1000)
            while server.status().sessions:  # noqa: ASYNC110 - counted in another thread
                await asyncio.sleep(0.01)
            return server.status()
        finally:
            await server.stop(0.2)

    status = asyncio.run(asyncio.wait_for(fire(), 300))
    assert streams.wrong == []
    assert streams.whole > 2
    assert min(streams.ends["went on to its end"], streams.ends["InvalidArgument"]) > 2
    assert status.kv_pages_free == config.kv_tokens // config.page_size
    assert not [each for each in caplog.records if each.name.startswith("outrider") and each.levelname == "ERROR"]


def test_a_stream_whose_text_is_not_the_targets_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = machines_under_fire.step

    def wrong_step(session: object) -> None:
        right(session)  # type: ignore[arg-type]
        session.transcript[-1] ^= 1  # type: ignore[attr-defined]

    monkeypatch.setattr(machines_under_fire, "step", wrong_step)
    verifier = VerifierUnderFire(random.Random(1))
    verifier.receive(recorded_stream(0)[0][0])
    verifier.finish_turn()
    with pytest.raises(AssertionError, match="not the target's"):
        verifier.check()
    honest = HonestSession()
    with pytest.raises(AssertionError, match="lost its text"):
        decode_a_text(honest)


def decode_a_text(honest: HonestSession) -> None:
    while not honest.texts:
        honest.go_on()


def test_an_error_of_another_tree_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(data: bytes, *_: object) -> None:
        raise KeyError(data[:1])

    monkeypatch.setattr(codec, "decode_edge_frame", breaks)
    monkeypatch.setattr(codec, "decode_cloud_frame", breaks)
    with pytest.raises(KeyError):
        VerifierUnderFire(random.Random(1)).receive(b"x")
    with pytest.raises(KeyError):
        EdgeUnderFire(random.Random(1)).receive(b"x")


def test_growth_and_wrong_ends_are_reported() -> None:
    part = Part("verifier", 10, 1.0, 100.0, 200.0, {}, 1, ["it ended with status -11"])
    assert part.check() == ["verifier: it ended with status -11", "verifier has grown from 100 to 200 MiB"]


@pytest.mark.soak
def test_a_verifier_survives_damaged_streams_and_honest_texts_beside_them_are_exact(tmp_path) -> None:
    part = asyncio.run(fire_at_verifier(3000, 7, tmp_path))
    assert part.check() == []
    assert part.honest_texts > 2
    assert part.outcomes["went on to its end"] > 5
