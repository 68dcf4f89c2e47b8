"""What the benchmark takes from replay: costs out of a real run, hit traces of its texts."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from outrider.bench.benchmark.measure import Measured
from outrider.bench.replay.costs import Costs
from outrider.bench.replay.record import record_trace
from outrider.bench.replay.traces import HitTrace
from outrider.cloud.engine import StepFigures
from outrider.edge import Client, Sampling
from outrider.edge.drafters.protocol import Drafter
from outrider.proto.policy import Line
from outrider.proto.types import FinishReason


def costs_of(texts: Sequence[Measured], steps: Sequence[StepFigures], *, pace_s: float, round_trip_s: float) -> Costs:
    """The costs that drafted texts show.

    Args:
        texts: decoded with drafts, over a link whose round trip is next to nothing.
        steps: of the verifier, for these texts.
        pace_s: of the verifier.
        round_trip_s: that was measured on that link: what gRPC and the event loops take, half on either side.
    """
    step = Line(fade=1.0)
    drafting = []
    for text in texts:
        for commit, _ in text.journal.commits[1:]:  # the first step reads the prompt
            step.add(commit.judged + 1, commit.timing.verify_s)
        drafting += [(ended - began) / tokens for began, ended, tokens in text.journal.jobs if tokens > 1]
    first_steps = [(text.journal.commits[0][0].timing.verify_s, text) for text in texts]
    prefill = median(max(0.0, seconds - step.base) / max(1, prompt_length(text)) for seconds, text in first_steps)
    return Costs(
        step_s=step.base,
        row_s=step.slope,
        pace_s=pace_s,
        prefill_row_s=prefill,
        drafting_s=median(drafting) if drafting else Costs().drafting_s,
        edge_event_s=round_trip_s / 2,
        cloud_event_s=round_trip_s / 2,
        commit_s=median(step.overhead_s for step in steps),
    )


def prompt_length(text: Measured) -> int:
    """In tokens: where its first commit begins."""
    return text.journal.commits[0][0].start


def traces_of(texts: Sequence[Measured], client: Client, drafter: Drafter, sampling: Sampling) -> list[HitTrace]:
    """Where `drafter` hits in texts that the target wrote."""
    return [
        record_trace(
            text.prompt,
            client.encode(text.prompt.text),
            text.tokens,
            drafter,
            sampling,
            ended=text.journal.commits[-1][0].finish is FinishReason.EOS,
        )
        for text in texts
    ]
