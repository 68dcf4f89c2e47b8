"""Output of `outrider status`: a JSON object of a fixed shape, and tables for 80 columns."""

from __future__ import annotations

import io
import itertools
from dataclasses import asdict

from rich.console import Console

from outrider.deploy.status import as_json, links_of, tables
from outrider.proto.cluster_status import (
    ClassAcceptance,
    ClusterStatus,
    EdgeStatus,
    RelayStatus,
    TrainerStatus,
    VerifierStatus,
    VersionStatus,
    decode_status,
    encode_status,
)
from outrider.proto.types import DrafterManifest, DrafterPrior, RemoteFile, SessionReport


def report(verifier: str = "llama-0", edge: str = "kitchen", **fields: object) -> SessionReport:
    defaults = {
        "drafter": "general",
        "drafter_version": "abc",
        "committed_tokens": 100,
        "accepted_tokens": 60,
        "verified_tokens": 80,
        "seconds": 2.0,
        "uplink_bytes": 2000,
        "downlink_bytes": 3000,
        "round_trip_s": 0.030,
    }
    return SessionReport("s", "llama", verifier, edge=edge, **{**defaults, **fields})  # type: ignore[arg-type]


def cluster() -> ClusterStatus:
    reports = (report(), report(edge="garden", seconds=8.0, round_trip_s=0.05, verified_tokens=0, accepted_tokens=0))
    drafting = {
        "drafter_here": "general@27a9646b40d5",
        "committed_tokens": 123_456,
        "drafted_here": 90_123,
        "verified_here": 70_000,
        "accepted_here": 41_000,
        "drafting_here_s": 312.3456,
        "context_length": 8192,
        "server": "vLLM 0.32.0, V1",
        "gap_s": 0.0215,
    }
    host, kept = "10.244.12.103:50061", ("bytes", "bfloat16")
    verifier = VerifierStatus(
        "llama-0", host, "llama", "ready", 12, 0.0105, 1, 1024, "0.1.0", 32, 2048, *kept, **drafting
    )
    return ClusterStatus(
        verifiers=(verifier, VerifierStatus("llama-1", "", "llama", "down", release="0.1.0")),
        drafters=(DrafterManifest("general", "abc", "a" * 64, "llama", (RemoteFile("f", "b" * 64, 5_300_000),)),),
        leases_granted=7,
        recent=reports,
        relay=RelayStatus(streams=1),
        release="0.2.0",
        edges=(EdgeStatus("garden", reports[1], 3.0, 5), EdgeStatus("kitchen", reports[0], 130.0, 2)),
        acceptance=(
            ClassAcceptance("llama", 3, 2, DrafterPrior("general", "abc", 0.71234, 812.34)),
            ClassAcceptance("llama", 15, 0, DrafterPrior("ngram", "1", 0.25, 40.0)),
        ),
    )


def printed(status: ClusterStatus, width: int = 80) -> str:
    text = io.StringIO()
    Console(file=text, width=width, color_system=None).print(tables(status))
    return text.getvalue()


def guarantees(*verifiers: VerifierStatus) -> list[str]:
    return [line for line in printed(ClusterStatus(verifiers, (), 0, ())).splitlines() if ": " in line]


def test_the_json_object_has_the_documented_shape() -> None:
    links = {
        "sessions": 1,
        "round_trip_ms": 30.0,
        "acceptance": 0.75,
        "tokens_per_s": 50.0,
        "uplink_bytes_per_token": 20.0,
        "downlink_bytes_per_token": 30.0,
        "resumes": 0,
    }
    shown = as_json(cluster())
    keys = {"verifiers", "drafters", "edges", "acceptance", "versions", "leases_granted", "relay", "recent"}
    assert set(shown) == keys | {"trainers", "release"}
    assert shown["release"] == "0.2.0"
    assert shown["acceptance"][0] == {
        "model": "llama",
        "drafter": "general",
        "drafter_version": "abc",
        "prompt_class": "code",
        "link_class": 2,
        "acceptance": 0.7123,
        "trials": 812.3,
    }
    assert shown["acceptance"][1]["prompt_class"] == "15", "a kind that only a later release has a name for"
    first, second = shown["verifiers"]
    assert first.pop("links") == {**links, "sessions": 2, "round_trip_ms": 40.0, "tokens_per_s": 20.0}
    assert first == {
        "name": "llama-0",
        "state": "ready",
        "model": "llama",
        "address": "10.244.12.103:50061",
        "release": "0.1.0",
        "sessions": 12,
        "max_sessions": 32,
        "load": 0.375,
        "step_ms": 10.5,
        "gap_ms": 21.5,
        "restarts": 1,
        "kv_pages": 2048,
        "kv_pages_free": 1024,
        "guarantee": "bytes",
        "precision": "bfloat16",
        "context_length": 8192,
        "server": "vLLM 0.32.0, V1",
        "drafter_here": "general@27a9646b40d5",
        "committed_tokens": 123_456,
        "drafted_here": 90_123,
        "verified_here": 70_000,
        "accepted_here": 41_000,
        "drafting_here_s": 312.346,
        "share_here": 0.3321,
    }
    assert (second["links"], second["load"], second["drafter_here"], second["share_here"]) == (None, 0.0, "", None)
    assert shown["edges"][1] == {
        "edge": "kitchen",
        "age_s": 130.0,
        "sessions": 2,
        "verifier": "llama-0",
        "model": "llama",
        "drafter": "general",
        "drafter_version": "abc",
        "links": links,
    }
    assert shown["edges"][0]["links"]["acceptance"] is None, "nothing was verified"
    assert shown["drafters"][0]["bytes"] == 5_300_000
    assert shown["recent"][0]["committed_tokens"] == 100
    assert not {"drafter_hits", "prompt_class", "link_class"} & set(shown["recent"][0]), "it is in no report"


def test_the_tables_fit_80_columns_and_cut_nothing() -> None:
    text = printed(cluster())
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    words = ("llama-0", "10.244.12.103:50061", "12/32", "10.5", "50%", "down", "0.1.0", "kitchen", "garden", "30.0 ms")
    for word in (*words, "0.2.0", "75%", "2 m", "general", "7 leases granted, 12 sessions now; 1 of them relayed"):
        assert word in text
    assert sum("llama-0" in line for line in lines) == 6, (
        "as a verifier, and by drafts, links, guarantee, precision, server"
    )


def test_the_drafters_beside_targets_have_a_table_where_there_are_any() -> None:
    def said(*verifiers: VerifierStatus) -> list[list[str]]:
        lines = [line.split() for line in printed(ClusterStatus(verifiers, (), 0, ())).splitlines()]
        begin = next((n for n, line in enumerate(lines) if "own" in line), len(lines))
        return list(itertools.takewhile(bool, lines[begin:]))

    works = cluster().verifiers[0]
    idle = VerifierStatus("llama-2", "", "llama", "ready", drafter_here="ngram@1")
    broken = VerifierStatus("llama-3", "", "llama", "ready", committed_tokens=100, drafted_here=7, drafting_here_s=0.5)
    none = VerifierStatus("llama-1", "", "llama", "ready", committed_tokens=100)
    assert said(none) == []
    assert said(none, works, idle, broken)[1:] == [
        ["llama-0", "general@27a9646b40d5", "90123", "70000", "41000", "33%", "312.3"],
        ["llama-2", "ngram@1", "0", "0", "0", "-", "0.0"],
        ["llama-3", "given", "up", "7", "0", "0", "0%", "0.5"],
    ]


def test_every_guarantee_names_its_verifiers() -> None:
    kinds = ("bytes", "distribution", "bytes", "bytes_by_tiles", "")
    verifiers = (VerifierStatus(f"v{i}", "", "m", "ready", guarantee=kind) for i, kind in enumerate(kinds))
    assert guarantees(*verifiers) == [
        "v0, v2: a text keeps its bytes whatever shares its steps",
        "v3: a text keeps its bytes whatever shares its steps, by slow tiles",
        "v1: near-ties of a text may fall either way",
    ]


def test_every_precision_names_its_verifiers_and_mixed_models_are_named() -> None:
    kinds = (("m", "float32"), ("m", "bfloat16"), ("n", "float32"), ("o", ""))
    verifiers = tuple(VerifierStatus(f"v{i}", "", model, "ready", precision=p) for i, (model, p) in enumerate(kinds))
    each = ["v1: computing in bfloat16", "v0, v2: computing in float32"]
    assert guarantees(*verifiers) == [*each, "m: a text that has begun goes on in its own precision alone"]
    assert guarantees(*verifiers[1:]) == ["v1: computing in bfloat16", "v2: computing in float32"]


def test_without_sessions_there_are_no_links() -> None:
    assert links_of([]) is None
    assert "round trip" not in printed(ClusterStatus((), (), 0, ()))


def test_the_whole_view_survives_the_wire() -> None:
    assert decode_status(encode_status(cluster())) == cluster()


# --- versions ---

VERSIONS = (
    VersionStatus("code", "1" * 12, "current", 1.0),
    VersionStatus("general", "def0123456789", "current", 1.0, "", 60.0, "abc", 31, 0.01234, -1.5, 0.7512, 800.04),
    VersionStatus("general", "abc", "previous", 0.1, "def0123456789 is newer", 60.0, acceptance=0.7),
    VersionStatus("general", "bad", "retired", 0.0, "hits -0.121 against abc in 12 texts", 7200.0),
)


def test_versions_are_shown_with_what_decided_on_each() -> None:
    status = ClusterStatus((), (), 0, (), versions=VERSIONS)
    lines = [line for line in printed(status, 200).splitlines() if line.startswith("general")]
    assert [line.split()[1:3] for line in lines] == [
        ["def012345678", "current"],
        ["abc", "previous"],
        ["bad", "retired"],
    ]
    assert "75%" in lines[0]
    assert "+0.012 in 31" in lines[0]
    assert "10%" in lines[1]
    assert "hits -0.121 against abc in 12 texts" in lines[2]
    assert "code" not in printed(status, 200), "a drafter with one version has nothing to compare"
    assert "current" not in printed(ClusterStatus((), (), 0, (), versions=VERSIONS[:2]), 200)


def test_versions_in_json_hold_every_field_and_round_what_is_measured() -> None:
    (compared,) = [v for v in as_json(ClusterStatus((), (), 0, (), versions=VERSIONS))["versions"] if v["texts"]]
    rounded = {"age_s": 60.0, "difference": 0.0123, "acceptance": 0.7512, "trials": 800.0}
    assert compared == asdict(VERSIONS[1]) | rounded


# --- trainers ---

TRAINERS = (
    TrainerStatus(
        "reference",
        "waiting for idle time",
        "general",
        "8" * 12,
        sequence=3,
        load=0.87654,
        waited_s=42.04,
        hurried=2,
        cpu_share=0.31234,
        max_cpu_share=0.5,
        steps=160,
        positions=123_456,
        keys=9,
        waiting=700,
        candidate=4,
        candidate_texts=37,
        candidate_difference=0.021234,
        published=3,
        dropped=1,
    ),
    TrainerStatus("tiny", "loading"),
)


def test_a_trainer_is_shown_with_what_it_waits_for_and_tries() -> None:
    text = printed(ClusterStatus((), (), 0, (), trainers=TRAINERS))
    assert max(map(len, text.splitlines())) <= 80
    for word in ("42 s", "88%", "31%/50%", "160", "4: +0.021", "loading"):
        assert word in text
    wide = printed(ClusterStatus((), (), 0, (), trainers=TRAINERS), 200)
    assert "waiting for idle time for 42 s" in wide
    assert "4: +0.021 in 37" in wide
    assert "on trial" not in printed(ClusterStatus((), (), 0, ()), 200), "without trainers there is no table"


def test_a_trainer_in_json_holds_every_field() -> None:
    first, second = as_json(ClusterStatus((), (), 0, (), trainers=TRAINERS))["trainers"]
    assert first == asdict(TRAINERS[0]) | {
        "load": 0.8765, "waited_s": 42.0, "cpu_share": 0.3123, "candidate_difference": 0.0212,
    }  # fmt: skip
    assert (second["model"], second["state"], second["drafter"]) == ("tiny", "loading", "")
