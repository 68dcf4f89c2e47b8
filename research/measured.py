"""The costs and hit traces of a replay, from texts that a benchmark has measured."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from statistics import median

from outrider.bench.benchmark.measure import Measured
from outrider.cloud.serving.step_timing import StepTiming
from outrider.drafters.protocol import Drafter
from outrider.edge import Client, Sampling
from outrider.proto.policy import Line
from outrider.proto.types import FinishReason
from research.replay.hit_recorder import HitRecorder
from research.replay.hit_traces import HitTrace
from research.simulator.clock import Costs
from research.text_writer import TextRequest


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
    with closing(HitRecorder({drafter.name: drafter}, requests)) as recorder:
        return [
            trace
            for text, request in zip(texts, requests, strict=True)
            for trace in recorder.record(request, text.tokens, ended=text.commits[-1][0].finish is FinishReason.EOS)
        ]
