"""Replay against the real thing: a paced verifier and a link in processes of their own, an edge with its drafter."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import pytest

from outrider.bench.bench_command import Measured, measure_text
from outrider.bench.bench_verifier import VerifierProcess
from outrider.cloud.serving.steps import StepTiming
from outrider.cloud.verifier_config import VerifierConfig
from outrider.deploy.built_in_prompts import held_out
from outrider.deploy.link.link_process import LinkProcess
from outrider.deploy.link.shape import LinkShape
from outrider.drafters.protocol import Drafter
from outrider.edge import Client, EdgeConfig, Sampling
from outrider.proto.policy import Line
from outrider.proto.types import FinishReason
from research.simulator.clock import Costs
from research.text_writer import TextRequest
from research.traces.recordings import HitTrace
from research.traces.trace_recording import hits_of
from research.traces.traced import Policy, ReplayOutcome, replay, tokens_per_second

pytestmark = pytest.mark.alone

MIN_STEP_S = 0.030
LINK = LinkShape.of(rtt_ms=40, up_mbit=10, down_mbit=50)
SAMPLING = Sampling(max_tokens=40)
WARM_UP = 16
POLICIES = {"cloud": Policy(drafting=False), "outrider": Policy(trees=True)}
SETTINGS: dict[str, dict[str, Any]] = {"cloud": {"drafter": "none"}, "outrider": {}}
ATTEMPTS = 3  # the machine may be busy with something else


@dataclass(frozen=True)
class Agreement:
    """Measured and replayed."""

    texts: list[Measured]
    outcomes: list[ReplayOutcome]

    @property
    def speed(self) -> float:
        """Replayed tokens a second over measured."""
        measured = sum(len(text.tokens) for text in self.texts) / sum(text.seconds for text in self.texts)
        return tokens_per_second(self.outcomes) / measured

    @property
    def steps(self) -> float:
        """Replayed steps over measured."""
        return sum(o.statistics.steps for o in self.outcomes) / sum(t.statistics.steps for t in self.texts)

    @property
    def downlink(self) -> float:
        """Replayed bytes of messages over measured, from the verifier."""
        measured = sum(t.statistics.downlink_bytes for t in self.texts)
        return sum(o.statistics.downlink_bytes for o in self.outcomes) / measured

    @property
    def good(self) -> bool:
        """Whether they are close enough."""
        return abs(self.speed - 1) < 0.2 and abs(self.steps - 1) < 0.15 and abs(self.downlink - 1) < 0.15


def costs_of(
    texts: Sequence[Measured], steps: Sequence[StepTiming], *, min_step_s: float, round_trip_s: float
) -> Costs:
    """Return the costs that drafted texts show.

    Args:
        texts: texts decoded with drafts, over a link with almost no round trip.
        steps: the verifier's steps of these texts.
        min_step_s: shortest step of the verifier.
        round_trip_s: round trip measured on that link, which gRPC and event loops take, half on either side.
    """
    step = Line(fade=1.0)
    drafting = []
    for text in texts:
        for commit, _ in text.commits[1:]:  # the first step reads the prompt
            step.add(commit.verified + 1, commit.timing.verify_s)
        drafting += [(ended - began) / tokens for began, ended, tokens in text.jobs if tokens > 1]
    first_commits = [text.commits[0][0] for text in texts]  # each begins where its prompt ends
    prefill = median(max(0.0, c.timing.verify_s - step.base) / max(1, c.start) for c in first_commits)
    return Costs(
        step_s=step.base,
        row_s=step.slope,
        min_step_s=min_step_s,
        prefill_row_s=prefill,
        drafting_s=median(drafting) if drafting else Costs().drafting_s,
        edge_event_s=round_trip_s / 2,
        cloud_event_s=round_trip_s / 2,
        commit_s=median(step.overhead_s for step in steps),
    )


def traces_of(texts: Sequence[Measured], client: Client, drafter: Drafter, sampling: Sampling) -> list[HitTrace]:
    """Record where `drafter` hits in texts that the target wrote."""
    prompts = [text.prompt for text in texts]
    requests = [TextRequest(client.encode(prompt.text), sampling, prompt.id, prompt.domain) for prompt in prompts]
    return [
        trace
        for text, request in zip(texts, requests, strict=True)
        for trace in hits_of(
            {drafter.name: drafter}, request, text.tokens, ended=text.commits[-1][0].finish is FinishReason.EOS
        )
    ]


def costs_seen(texts: list[Measured], steps: list[StepTiming]) -> Costs:
    over_the_link_s = min(text.statistics.round_trip_s for text in texts)
    return costs_of(texts, steps, min_step_s=MIN_STEP_S, round_trip_s=max(0.0, over_the_link_s - LINK.rtt_s))


def replayed(traces: list[HitTrace], costs: Costs, policy: Policy) -> list[ReplayOutcome]:
    """Replay the texts after the same warm-up as in the real run."""
    return replay([traces[0].first(WARM_UP), *traces], lambda _: LINK, costs, policy)[1:]


def test_replayed_speed_and_steps_are_those_of_a_real_run(tmp_path) -> None:
    prompts = held_out(1)[:3]

    async def main() -> dict[str, Agreement]:
        tokenizer = tmp_path / "tokenizer.json"
        async with AsyncExitStack() as stack:
            verifier = VerifierProcess(VerifierConfig(threads=1, min_step_s=MIN_STEP_S, draft_here="off"), tokenizer)
            await stack.enter_async_context(verifier)
            link = await stack.enter_async_context(LinkProcess(verifier.address, LINK))
            clients = {}
            for mode, settings in SETTINGS.items():
                chosen = {"drafter": "general"} | settings
                config = EdgeConfig(verifier=link.address, model="reference", tokenizer=tokenizer, **chosen)
                clients[mode] = await stack.enter_async_context(Client(config))
                await measure_text(clients[mode], prompts[0], replace(SAMPLING, max_tokens=WARM_UP))
            traces: list[HitTrace] = []
            for _ in range(ATTEMPTS):
                texts = {
                    mode: [await measure_text(client, prompt, SAMPLING) for prompt in prompts]
                    for mode, client in clients.items()
                }
                drafting = clients["outrider"]
                assert drafting.drafter is not None
                traces = traces or traces_of(texts["cloud"], drafting, drafting.drafter, SAMPLING)
                assert [text.tokens for text in texts["outrider"]] == [trace.tokens for trace in traces]
                costs = costs_seen(texts["outrider"], await verifier.step_timings())
                agreements = {
                    mode: Agreement(measured, replayed(traces, costs, POLICIES[mode]))
                    for mode, measured in texts.items()
                }
                if all(agreement.good for agreement in agreements.values()):
                    break
        return agreements

    for mode, agreement in asyncio.run(main()).items():
        assert abs(agreement.speed - 1) < 0.2, f"{mode}: replayed {agreement.speed:.2f} times the measured speed"
        assert abs(agreement.steps - 1) < 0.15, f"{mode}: replayed {agreement.steps:.2f} times the measured steps"
        assert abs(agreement.downlink - 1) < 0.15, f"{mode}: replayed {agreement.downlink:.2f} times the bytes down"
