"""An edge's metrics: exact counts of what happened, phases that add up, an estimate of the speed-up near the truth."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from bad_link import Faults
from checked_simulation import HASH, CheckedSimulation, open_frame, rules
from oracle_drafters import drafter_of, hashing_oracle
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from outrider.deploy.metrics_table import metrics_by_part
from outrider.edge.daemon.daemon_metrics import TextObserver, metrics_of
from outrider.edge.decoding import Observer, Subject
from outrider.edge.edge_metrics import MAX_SERIES, EdgeMetrics
from outrider.proto.errors import Internal, ResourceExhausted, Unavailable
from outrider.proto.session import Done, Drafted, DrafterFailed, EdgeSession, StopRequested, TurnBegun
from outrider.proto.types import Commit, CommittedToken, Draft, DraftToken, FinishReason, Opened, Sampling, Timing

WHOSE = {"model_name": "m", "drafter": "d"}
PHASE = "outrider:edge_phase_seconds"
SHARED = {"part": "edge", **WHOSE}


class ObservedSimulation(CheckedSimulation):
    """A simulated decoding that keeps an observer, as the edge's loop does."""

    def __init__(self, observer: Observer, *args, **options) -> None:
        super().__init__(*args, **options)
        self.observer = observer

    def run(self, limit_s: float = 10_000.0) -> tuple[int, ...]:
        self.observer.began(Subject("s", "m", "d"), self.edge, self.now)
        text = super().run(limit_s)
        self.observer.ended(self.done, self.now)
        return text

    def send(self, frame) -> None:
        self.observer.sent(frame, self.now)
        super().send(frame)

    def handle(self, event) -> None:
        if isinstance(event, Drafted):
            self.observer.drafted(self.now - event.seconds, self.now, len(event.drafts))
        super().handle(event)

    def receive(self, stream, frame) -> None:
        if stream is self.stream:
            self.observer.received(frame, self.now)
        super().receive(stream, frame)


def values(metrics: EdgeMetrics) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Samples of a scrape by name and labels."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(metrics.exposition()[0].decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def value(metrics: EdgeMetrics, name: str, **labels: str) -> float:
    return values(metrics)[name][tuple(sorted(labels.items()))]


def simulate(metrics: EdgeMetrics | None, right: float, seed: int, *, tokens: int = 200, **options) -> float:
    """Decode in simulation; seconds from the first commit to the last. No metrics: plain cloud streaming."""
    oracle = hashing_oracle(seed, eos_odds=0.0)
    frame = open_frame(sampling=Sampling(max_tokens=tokens, ignore_eos=True), drafting=metrics is not None, session="s")
    times: list[float] = []

    class Clock(Observer):
        def received(self, frame, at) -> None:
            if isinstance(frame, Commit) and frame.tokens:
                times.append(at)

    clock = Clock()
    observer = metrics.observer() if metrics else clock
    drafter = drafter_of(oracle, seed, right, confidence="telling") if metrics else None
    settings = {
        "verifier": rules(context_length=4096),
        "link": Faults(delay_s=0.02),
        "step_s": 0.03,
        "drafting_s": 0.002,
    }
    simulation = ObservedSimulation(observer, frame, oracle, drafter, **settings | options)
    simulation.run()
    if metrics is None:
        return times[-1] - times[0]
    assert observer.machine is simulation.edge
    return observer.decoding_s


def machine_of(metrics: EdgeMetrics, model: str = "m", drafter: str = "d", *, error: str = ""):
    """An observer that has begun and been opened at 0 s."""
    frame = open_frame()
    machine = EdgeSession(frame)
    machine.statistics.drafter_error = error
    observer = metrics.observer()
    observer.began(Subject("s", model, drafter), machine, 0.0)
    observer.sent(frame, 0.0)
    observer.received(Opened(committed=0, credit=16, max_tokens=40, verifier="v", context_length=512), 0.0)
    return observer, machine


def commit(start: int, *, accepted: int, verified: int, n: int | None = None, **timing: float) -> Commit:
    tokens = tuple(range(1, 1 + (accepted + 1 if n is None else n)))
    return Commit(start, tuple(map(CommittedToken, tokens)), accepted, 16, verified=verified, timing=Timing(**timing))


def test_speculation_counts_are_named_and_counted_as_vllm_does() -> None:
    metrics = EdgeMetrics()
    observer, _ = machine_of(metrics)
    for accepted, verified in ((0, 4), (2, 4), (4, 4), (0, 0)):
        observer.received(commit(3, accepted=accepted, verified=verified, verify_s=0.03), 1.0)
    assert value(metrics, "outrider:spec_decode_num_drafts_total", **SHARED) == 3
    assert value(metrics, "outrider:spec_decode_num_draft_tokens_total", **SHARED) == 12
    assert value(metrics, "outrider:spec_decode_num_accepted_tokens_total", **SHARED) == 6
    per_position = [
        value(metrics, "outrider:spec_decode_num_accepted_tokens_per_pos_total", **SHARED, position=str(position))
        for position in range(5)
    ]
    assert per_position == [2, 2, 1, 1, 0]


def test_an_observer_keeps_no_times_of_messages_that_commits_have_echoed() -> None:
    metrics = EdgeMetrics()
    observer, _ = machine_of(metrics)
    for number in range(1, 51):
        observer.sent(Draft(0, 3, (DraftToken(5),)), 1.0 * number)
        observer.received(commit(3, accepted=0, verified=1, echo=number, hold_s=0.25), 1.0 * number + 0.5)
        assert len(observer._sent_at) == 0
    observer.received(commit(3, accepted=0, verified=1, echo=50, hold_s=0.25), 90.0)  # it repeats the last
    assert value(metrics, "outrider:edge_round_trip_seconds_count", **WHOSE) == 50
    assert value(metrics, "outrider:edge_round_trip_seconds_sum", **WHOSE) == pytest.approx(50 * 0.25)


# by metric, the field of a session's statistics that it sums
COUNTED = {
    "generation_tokens": "committed",
    "edge_uplink_bytes": "uplink_bytes",
    "edge_resumes": "resumes",
    "edge_steering_vectors": "vectors",
    "edge_steering_bytes": "vector_bytes",
    "edge_steering_bad_vectors": "bad_vectors",
    "edge_steering_age_positions": "vector_age",
    "edge_steered_jobs": "steered_jobs",
    "edge_accepted_verifier_tokens": "accepted_cloud",
    "edge_verifier_drafting_seconds": "cloud_drafting_s",
    "edge_drafting_seconds": "drafting_s",
}


def test_the_counts_of_live_and_ended_texts_are_those_of_their_sessions() -> None:
    metrics = EdgeMetrics()
    texts = [machine_of(metrics) for _ in range(2)]
    ends = zip(texts, (Done(FinishReason.EOS), None), ("eos", "cancelled"), strict=True)
    for left, ((observer, machine), done, reason) in enumerate(ends):
        for number, field in enumerate(COUNTED.values(), 1):
            setattr(machine.statistics, field, number * 100**left)
        for over in (False, True):
            if over:
                observer.ended(done, 1.0)
            whole = sum(100**n for n in range(left + 1))
            for number, name in enumerate(COUNTED, 1):
                labels = SHARED if name == "generation_tokens" else WHOSE
                assert value(metrics, f"outrider:{name}_total", **labels) == number * whole
        assert value(metrics, "outrider:edge_sessions", **WHOSE) == 1 - left
        assert value(metrics, "outrider:edge_texts_total", **WHOSE, finished_reason=reason) == 1


def test_the_phases_of_a_round_trip_add_up_to_its_time() -> None:
    metrics = EdgeMetrics()
    observer, _ = machine_of(metrics)
    observer.drafted(0.90, 0.95, 2)
    observer.sent(Draft(0, 3, tuple(map(DraftToken, (1, 2)))), 1.0)
    observer.received(commit(3, accepted=2, verified=2, echo=1, hold_s=0.05, queue_s=0.02, verify_s=0.03), 1.09)
    sums = {phase: value(metrics, f"{PHASE}_sum", **WHOSE, phase=phase) for phase in phases()}
    assert sums["draft"] == pytest.approx(0.05)
    assert sums["uplink"] == sums["downlink"] == pytest.approx(0.02)
    assert sum(sums.values()) - sums["draft"] == pytest.approx(1.09 - 1.0)
    assert value(metrics, "outrider:edge_round_trip_seconds_sum", **WHOSE) == pytest.approx(0.04)
    # A second commit that echoes the same message says nothing new about the link.
    observer.received(commit(6, accepted=0, verified=0, echo=1, hold_s=0.08, queue_s=0.0, verify_s=0.03), 1.12)
    assert value(metrics, f"{PHASE}_count", **WHOSE, phase="uplink") == 1
    assert value(metrics, f"{PHASE}_count", **WHOSE, phase="verify") == 2


def phases() -> tuple[str, ...]:
    return ("draft", "uplink", "queue", "verify", "downlink")


def test_losses_sheds_and_fallbacks_are_counted_apart() -> None:
    metrics = EdgeMetrics()
    observer, machine = machine_of(metrics)
    observer.lost(ResourceExhausted("full", retry_after_s=1), 1.0)
    observer.lost(Unavailable("gone"), 2.0)
    machine_of(metrics, drafter="none", error="cannot be read")
    machine.handle(DrafterFailed(Internal("broken"), 0), 0.0)
    assert value(metrics, "outrider:edge_sheds_total", **WHOSE) == 1
    assert value(metrics, "outrider:edge_stream_losses_total", **WHOSE, error="ResourceExhausted") == 1
    assert value(metrics, "outrider:edge_stream_losses_total", **WHOSE, error="Unavailable") == 1
    assert value(metrics, "outrider:edge_fallbacks_total", **WHOSE, reason="failed") == 1
    none = WHOSE | {"drafter": "none"}
    assert value(metrics, "outrider:edge_fallbacks_total", **WHOSE, reason="missing") == 0
    assert value(metrics, "outrider:edge_fallbacks_total", **none, reason="missing") == 1
    observer.ended(Done(error=Unavailable("gone")), 3.0)
    assert value(metrics, "outrider:edge_fallbacks_total", **WHOSE, reason="failed") == 1
    assert value(metrics, "outrider:edge_texts_total", **WHOSE, finished_reason="error") == 1


@pytest.mark.parametrize(("right", "row_s", "delay_s"), [(0.8, 0.0, 0.02), (0.9, 0.001, 0.005), (0.3, 0.002, 0.06)])
def test_the_estimated_speed_up_is_near_the_one_against_real_cloud_streaming(right, row_s, delay_s) -> None:
    metrics = EdgeMetrics()
    options = {"row_s": row_s, "link": Faults(delay_s=delay_s)}
    decoding_s = simulate(metrics, right, 5, **options)
    truth = simulate(None, right, 5, **options) / decoding_s
    estimate = value(metrics, "outrider:edge_cloud_streaming_seconds_total", **WHOSE) / value(
        metrics, "outrider:edge_decoding_seconds_total", **WHOSE
    )
    assert estimate == pytest.approx(truth, rel=0.03)
    assert value(metrics, "outrider:edge_speedup_ratio", **WHOSE) == pytest.approx(truth, rel=0.25)


def test_a_text_without_drafts_is_estimated_as_cloud_streaming_itself() -> None:
    metrics = EdgeMetrics()
    observer, _ = machine_of(metrics, drafter="none")
    at = 1.0
    for step in range(20):
        lasts_s = 0.1 / (1 + step)  # a verifier that warms up
        at += lasts_s
        observer.received(commit(3 + step, accepted=0, verified=0, verify_s=lasts_s), at)
    assert observer.speedup == pytest.approx(1.0, rel=1e-6)


def test_turns_of_a_conversation_are_texts_and_the_time_between_them_is_not_counted() -> None:
    metrics = EdgeMetrics()
    observer, machine = machine_of(metrics)
    for turn_at in (1.0, 1000.0):
        for step in range(3):
            observer.received(commit(3 + step, accepted=0, verified=0, verify_s=0.03), turn_at + 0.03 * step)
        machine.statistics.committed += 3
        observer.ended(Done(FinishReason.EOS), turn_at + 1)
        machine.handle(StopRequested(), turn_at + 1)
        machine.handle(TurnBegun(len(machine.transcript), (), machine.sampling), turn_at + 1)
        observer.began(Subject("s", "m", "d"), machine, turn_at + 500)
    assert value(metrics, "outrider:edge_decoding_seconds_total", **WHOSE) == pytest.approx(4 * 0.03)
    assert value(metrics, "outrider:edge_texts_total", **WHOSE, finished_reason="eos") == 2
    assert value(metrics, "outrider:generation_tokens_total", **SHARED) == 6
    assert value(metrics, "outrider:time_to_first_token_seconds_count", **WHOSE) == 2


def test_label_values_are_bounded_whatever_the_models_are_called() -> None:
    metrics = EdgeMetrics()
    for index in range(3 * MAX_SERIES):
        observer, _ = machine_of(metrics, model=f"m{index}")
        observer.ended(Done(FinishReason.EOS), 1.0)
    models = {dict(labels)["model_name"] for labels in values(metrics)["outrider:generation_tokens_total"]}
    assert len(models) == MAX_SERIES + 1
    assert "other" in models


def test_no_session_or_token_is_in_the_exposition() -> None:
    metrics = EdgeMetrics()
    frame = replace(open_frame(), session="secret-session")
    observer = metrics.observer()
    observer.began(Subject("secret-session", "m", "d"), EdgeSession(frame), 0.0)
    observer.sent(frame, 0.0)
    observer.received(commit(3, accepted=1, verified=2, verify_s=0.03), 1.0)
    body = metrics.exposition()[0]
    assert b"secret" not in body
    assert HASH.encode() not in body


def test_the_exposition_follows_the_accept_header_and_parses_in_both_formats() -> None:
    metrics = EdgeMetrics()
    simulate(metrics, 0.8, 8, tokens=40)
    text, kind = metrics.exposition()
    assert kind.startswith("text/plain")
    plain = {family.name for family in text_string_to_metric_families(text.decode())}
    body, kind = metrics.exposition("application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    declared = {metric.name for metric in metrics_by_part()["Edge"]}
    assert {family.name for family in parse_openmetrics(body.decode())} == declared == plain


def test_a_commit_before_anything_is_known_leaves_no_estimate() -> None:
    metrics = EdgeMetrics()
    observer, _ = machine_of(metrics)
    assert observer.speedup == 0
    assert "outrider:edge_speedup_ratio" not in values(metrics)
    assert not any(math.isnan(v) for samples in values(metrics).values() for v in samples.values())


def test_a_stream_says_which_accepted_drafts_were_made_here_and_which_in_the_cloud() -> None:
    observer = TextObserver(EdgeMetrics(), lambda _: None)
    assert (observer.live()["accepted"], observer.live()["accepted_cloud"]) == (0, 0)
    observer.machine = machine_of(EdgeMetrics())[1]
    observer.machine.statistics.accepted, observer.machine.statistics.accepted_cloud = 9, 2
    assert (observer.live()["accepted"], observer.live()["accepted_cloud"]) == (7, 2)


def test_an_answers_histogram_counts_up_to_the_most_that_a_step_verified() -> None:
    def observer(accepted_of: dict[int, int], max_verified: int) -> TextObserver:
        made = TextObserver(EdgeMetrics(), lambda _: None)
        made.accepted_of, made.max_verified = accepted_of, max_verified
        return made

    for observers, histogram in (
        ([observer({0: 3, 2: 1}, 4)], [3, 0, 1, 0, 0]),
        ([observer({0: 1}, 0), observer({1: 2}, 1)], [1, 2]),
        ([observer({}, 0)], [0]),
        ([], [0]),
    ):
        counts = metrics_of(observers, seed=1)["speculative_decoding"]
        assert counts["acceptance_histogram"] == histogram
        assert len(histogram) == counts["num_spec_tokens"] + 1
