"""Texts of several edges on one simulated verifier, whose target follows an oracle."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from bad_link import Faults, FaultySimulation
from oracle_drafters import Oracle, OracleTarget, Proposer, ScriptedDrafters, drafter_of, hashing_oracle

from outrider.cloud.serving.batching import Batching
from outrider.proto.session import EdgeSession
from outrider.proto.session.verifier import VerifierRules
from outrider.proto.types import Open, Sampling, ServiceGoal
from research.simulator.clock import Costs, VirtualClock
from research.simulator.simulated_verifier import SimulatedSource, SimulatedVerifier

HASH = "0" * 64
TOKENS = 60
ORACLE = hashing_oracle(7, eos_odds=0.0)
RULES = VerifierRules("v", "m", HASH, 8, 4096, frozenset({0}))
NO_FAULTS, COSTS = Faults(), Costs()


def prompt_of(edge: int, length: int = 3) -> tuple[int, ...]:
    return (1 + edge % 7, *(2,) * (length - 1))


def own_texts(edges: int, prompt: int = 3, *, oracle: Oracle = ORACLE, tokens: int = TOKENS) -> list[list[int]]:
    """Return the texts of plain decoding."""
    texts = []
    for i in range(edges):
        text = prompt_of(i, prompt)
        for _ in range(tokens):
            text += (oracle(text),)
        texts.append(list(text[-tokens:]))
    return texts


def decode(
    edges: int,
    *,
    faults: Faults = NO_FAULTS,
    rules: VerifierRules = RULES,
    prompt: int = 3,
    tokens: int = TOKENS,
    costs: Costs = COSTS,
    batching: Batching | None = None,
    local: Callable[[VirtualClock], SimulatedSource] | None = None,
    oracle: Oracle = ORACLE,
    proposer: Callable[[int], Proposer] = lambda i: drafter_of(ORACLE, i, 0.8, confidence="telling"),
    drafting_s: float = 0.002,
    service: Callable[[int], ServiceGoal | None] = lambda _: None,
    apart_s: float = 0.0,
    **of_frame: Any,
) -> tuple[list[FaultySimulation], float]:
    """Decode texts that begin `apart_s` one after the other; return their simulations, and when the last has ended."""
    clock = VirtualClock()
    source = local(clock) if local is not None else None
    verifier = SimulatedVerifier(clock, rules, OracleTarget(oracle), costs, batching, source)
    simulations = []
    for i in range(edges):
        rng, sampling = random.Random(i), Sampling(max_tokens=tokens, ignore_eos=True)
        frame = Open("m", HASH, prompt_of(i, prompt), sampling, f"s{i}", service=service(i), **of_frame)
        edge = EdgeSession(frame)
        drafters = ScriptedDrafters([proposer(i)], drafting_s, rng)
        simulations.append(FaultySimulation(clock, edge, verifier, drafters, faults, rng))
    for number, simulation in enumerate(simulations):
        clock.at(number * apart_s, simulation.begin)
    while any(simulation.done is None for simulation in simulations):
        clock.advance()
    return simulations, clock.now
