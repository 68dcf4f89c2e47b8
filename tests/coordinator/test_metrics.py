"""A coordinator's metrics: leases by outcome, the present fleet, and reports of finished sessions."""

from __future__ import annotations

import asyncio
import urllib.request
from dataclasses import replace

import pytest
from fake_cluster import ScriptedCluster, ready, write_package
from prometheus_client.parser import text_string_to_metric_families

from outrider.coordinator.cluster import VerifierState
from outrider.coordinator.coordinator_config import CoordinatorConfig
from outrider.coordinator.coordinator_metrics import MAX_MODELS, CoordinatorMetrics
from outrider.proto.cluster_status import TrainerStatus
from outrider.proto.errors import ConfigError, NotFound
from outrider.proto.types import DrafterHits, LeaseRequest, SessionReport


def scrape(address: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """Return the samples by name and label values, sorted by the names of the labels."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as reply:
        families = text_string_to_metric_families(reply.read().decode())
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


async def test_leases_verifiers_and_reports_are_shown(coordinating) -> None:
    cluster = ScriptedCluster(
        ready("a", sessions=2, restarts=3, step_s=0.03, kv_pages_free=7), replace(ready("b"), state=VerifierState.DOWN)
    )
    async with coordinating(cluster, metrics_listen="127.0.0.1:0") as call:
        await call("OpenLease", LeaseRequest(model="tiny", session="s1"))
        for prefixes in ((1, 2), (1, 3), (4,)):
            await call("OpenLease", LeaseRequest(model="tiny", session="s1", prefixes=prefixes))
        await call("OpenLease", LeaseRequest(model="tiny", session="s1", prefixes=(1, 2), inquiry=True))
        with pytest.raises(NotFound):
            await call("OpenLease", LeaseRequest(model="another", session="s2"))
        report = SessionReport(
            "s1", "tiny", "a", committed_tokens=50, accepted_tokens=30, verified_tokens=40, drafted_tokens=45, steps=20,
            seconds=2.5, uplink_bytes=1000, downlink_bytes=900, resumes=1,
        )  # fmt: skip
        await call("ReportSession", report)
        await call("ReportSession", report)
        found = await asyncio.to_thread(scrape, call.server.metrics_address)
        assert found["outrider:coordinator_leases_granted_total", ("tiny",)] == 4
        assert found["outrider:coordinator_leases_by_prefix_total", ("new",)] == 2
        assert found["outrider:coordinator_leases_by_prefix_total", ("same",)] == 1
        assert found["outrider:coordinator_leases_refused_total", ("NotFound",)] == 1
        assert found["outrider:coordinator_refused_calls_total", ("NotFound",)] == 1
        assert found["outrider:coordinator_verifiers", ("ready",)] == 1
        assert found["outrider:coordinator_verifiers", ("down",)] == 1
        assert found["outrider:coordinator_verifiers", ("draining",)] == 0
        assert found["outrider:coordinator_verifier_up", ("tiny", "a")] == 1
        assert found["outrider:coordinator_verifier_up", ("tiny", "b")] == 0
        assert found["outrider:coordinator_verifier_restarts_total", ("tiny", "a")] == 3
        assert found["outrider:coordinator_verifier_kv_pages_free", ("tiny", "a")] == 7
        assert found["outrider:coordinator_reported_sessions_total", ("tiny",)] == 2
        assert found["outrider:coordinator_reported_committed_tokens_total", ("tiny",)] == 100
        assert found["outrider:coordinator_reported_seconds_total", ("tiny",)] == 5
        assert not any("s1" in labels for _, labels in found)


async def test_a_relay_shows_its_streams_and_the_latency_that_it_adds(coordinating) -> None:
    async with coordinating(ScriptedCluster(ready("a")), metrics_listen="127.0.0.1:0", relay=True) as call:
        metrics = call.server.service.relay_metrics
        metrics.streams = 1
        metrics.opened.inc(4)
        metrics.broken.inc(2)
        metrics.passed_on("up", 100, 0.0002)
        metrics.passed_on("down", 50, 0.0004)
        found = await asyncio.to_thread(scrape, call.server.metrics_address)
        assert found["outrider:relay_streams", ()] == 1
        assert found["outrider:relay_streams_opened_total", ()] == 4
        assert found["outrider:relay_streams_broken_total", ()] == 2
        assert found["outrider:relay_bytes_total", ("up",)] == 100
        assert found["outrider:relay_frames_total", ("down",)] == 1
        assert found["outrider:relay_forward_seconds_count", ()] == 2
        assert found["outrider:relay_forward_seconds_sum", ()] == pytest.approx(0.0006)


async def test_the_versions_of_a_drafter_are_shown_by_state_and_with_their_evidence(coordinating, drafters) -> None:
    write_package(drafters / "1", version="1")
    async with coordinating(ScriptedCluster(ready("a")), drafters=(drafters,), metrics_listen="127.0.0.1:0") as call:
        write_package(drafters / ".2", version="2").rename(drafters / "2")
        await call.until(lambda: len(call.server.service.catalogue.manifests) == 2)
        await call.server.service.scan_drafters()
        hits = (DrafterHits("tiny-drafter", "1", 50, 100), DrafterHits("tiny-drafter", "2", 60, 100))
        await call("OpenLease", LeaseRequest("tiny", "s"))
        await call("ReportSession", SessionReport("s", "tiny", "a", edge="pi", drafter_hits=hits))
        found = await asyncio.to_thread(scrape, call.server.metrics_address)
        version = "outrider:coordinator_drafter_version"
        assert found[f"{version}s", ("tiny-drafter", "current")] == 1
        assert found[f"{version}s", ("tiny-drafter", "previous")] == 1
        assert found[f"{version}s", ("tiny-drafter", "retired")] == 0
        assert found[f"{version}_acceptance", ("tiny-drafter", "1")] == 0.5
        assert found[f"{version}_acceptance", ("tiny-drafter", "2")] == pytest.approx(0.6)
        assert found[f"{version}_share", ("tiny-drafter", "2")] == 1
        assert found[f"{version}_texts", ("tiny-drafter", "2")] == 1
        assert found[f"{version}_difference", ("tiny-drafter", "2")] == pytest.approx(0.1)
        assert (f"{version}_evidence", ("tiny-drafter", "2")) in found


async def test_trainers_are_shown_with_what_they_wait_for_and_what_they_try(coordinating) -> None:
    cluster = ScriptedCluster(ready("a"))
    works = {"load": 0.9, "waited_s": 12.5, "hurried": 2, "cpu_share": 0.4, "steps": 160, "waiting": 70, "published": 3}
    tries = {"candidate": 4, "candidate_texts": 37, "candidate_difference": -0.25, "dropped": 1}
    cluster.trainers = (
        TrainerStatus("tiny", "waiting for idle time", "general", **works, **tries),
        TrainerStatus("new", "loading"),
    )
    async with coordinating(cluster, metrics_listen="127.0.0.1:0") as call:
        assert (await call("Status", None)).trainers == cluster.trainers
        found = await asyncio.to_thread(scrape, call.server.metrics_address)
        prefix = "outrider:coordinator_trainer_"
        shown = {name.removeprefix(prefix): value for (name, labels), value in found.items() if labels == ("tiny",)}
        assert {name: value for name, value in shown.items() if not name.startswith("outrider:")} == {
            "up": 1,
            "load": 0.9,
            "waited_seconds": 12.5,
            "hurried_steps": 2,
            "cpu_share": 0.4,
            "steps": 160,
            "positions_waiting": 70,
            "candidate_texts": 37,
            "candidate_difference": -0.25,
            "versions_published": 3,
            "versions_dropped": 1,
        }
        new = {name: value for (name, labels), value in found.items() if labels == ("new",)}
        assert new == {f"{prefix}up": 0}, "a sum of 0 that grows to 160 at once would be a rate"


async def test_no_metrics_are_served_unless_asked_for(coordinating) -> None:
    async with coordinating(ScriptedCluster(ready("a"))) as call:
        assert call.server.metrics_address == ""


def test_models_that_strangers_report_cannot_grow_the_table_without_end() -> None:
    metrics = CoordinatorMetrics()
    for index in range(3 * MAX_MODELS):
        metrics.report(SessionReport("s", f"m{index}", "a", committed_tokens=1))
    name = "outrider:coordinator_reported_committed_tokens"
    (committed,) = (family for family in metrics.registry.collect() if family.name == name)
    by_model = {sample.labels["model_name"]: sample.value for sample in committed.samples if "_total" in sample.name}
    assert len(by_model) == MAX_MODELS + 1
    assert by_model["other"] == 2 * MAX_MODELS


def test_metrics_beyond_loopback_must_be_asked_for_plainly() -> None:
    with pytest.raises(ConfigError) as caught:
        CoordinatorConfig(lease_secret=b"0" * 16, metrics_listen="0.0.0.0:9100")
    assert caught.value.field == "metrics_listen"
    allowed = CoordinatorConfig(lease_secret=b"0" * 16, metrics_listen="0.0.0.0:9100", insecure_metrics=True)
    assert allowed.metrics_listen == "0.0.0.0:9100"
