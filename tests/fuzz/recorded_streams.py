"""Streams as honest edges and verifiers write them: the bytes from which mutations start."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from dataclasses import replace

from oracle_drafters import OracleTarget, ScriptedDrafters, drafter_of

from outrider.proto import codec
from outrider.proto.session import EdgeSession, TurnBegun
from outrider.proto.session.verifier import VerifierRules
from outrider.proto.types import CloudFrame, Continue, EdgeFrame, Open, Sampling
from research.simulator.clock import Costs, VirtualClock
from research.simulator.simulated_verifier import SimulatedVerifier
from research.simulator.simulation import Simulation

HASH = "ab" * 32
VOCAB = 61
PROMPT = (3, 1, 4, 1, 5)
TURN = Sampling(max_tokens=24, ignore_eos=True, temperature=1.0, seed=5)
CONTINUES = codec.encode_edge_frame(Continue(0, ()))[:1]  # the first byte of every such message
COSTS = Costs(step_s=0.02, row_s=0.0, prefill_row_s=0.0, job_s=0.0, edge_event_s=0.0, cloud_event_s=0.0, commit_s=0.0)


def oracle(prefix: tuple[int, ...]) -> int:
    """Return the target's token after a prefix; it is never EOS."""
    return 1 + zlib.crc32(bytes(prefix[-4:]) + len(prefix).to_bytes(4, "little")) % (VOCAB - 1)


def rules(**changes: object) -> VerifierRules:
    """Return the rules of the verifier that all recorded streams were written to."""
    fixed = {"name": "v", "model": "m", "tokenizer_sha256": HASH, "vocab_size": VOCAB, "context_length": 512}
    return VerifierRules(**(fixed | {"eos_tokens": frozenset({0})} | changes))  # type: ignore[arg-type]


class RecordingLink:
    """Carries frames at once, and keeps their bytes."""

    def __init__(self, sent: list[bytes], received: list[bytes]) -> None:
        self._sent, self._received = sent, received

    def up(self, frame: EdgeFrame, now: float) -> Iterator[tuple[float, EdgeFrame]]:
        self._sent.append(codec.encode_edge_frame(frame))
        yield now + 0.01, frame

    def down(self, frame: CloudFrame, now: float) -> Iterator[tuple[float, CloudFrame]]:
        self._received.append(codec.encode_cloud_frame(frame))
        yield now + 0.01, frame


def recorded_stream(seed: int, **changes: object) -> tuple[list[bytes], list[bytes]]:
    """Return what an edge sent and got in a session of two turns; `changes` are of its Open."""
    clock, rng, sent, received = VirtualClock(), random.Random(seed), list[bytes](), list[bytes]()
    session = f"recorded-{seed}"
    frame = Open("m", HASH, PROMPT, TURN, session, **{"keep_s": 5.0, **changes})  # type: ignore[arg-type]
    verifier = SimulatedVerifier(clock, rules(), OracleTarget(oracle), COSTS)
    proposer = drafter_of(oracle, seed, 0.7, confidence="telling", vocab=VOCAB, runners_up=2)
    drafters = ScriptedDrafters([proposer], 0.002, rng)
    edge = EdgeSession(frame, send_q=bool(seed % 2))
    simulation = Simulation(clock, edge, verifier, drafters, lambda _: RecordingLink(sent, received))
    simulation.run()
    simulation.done = None
    simulation.handle(TurnBegun(len(edge.transcript), (7, 8), replace(TURN, seed=6)))
    while simulation.done is None:
        clock.advance()
    return sent, received
