"""One rich example of every message, with all its fields set, and one with as few as it may have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from outrider.proto import codec
from outrider.proto import types as t
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

HASH = "0123456789abcdef" * 4
FILE = t.RemoteFile("tokenizer.json", HASH, 1 << 40)
MANIFESTS = (
    t.DrafterManifest("swift", "7", HASH, "reference", (FILE, t.RemoteFile("model.onnx", "ab" * 32, 3))),
    t.DrafterManifest("plain", "1", "", "", ()),
)
PRIORS = (t.DrafterPrior("swift", "7", 0.75, 120.5), t.DrafterPrior("plain", "", 0.0, 0.0))
HITS = (t.DrafterHits("swift", "7", 90, 128), t.DrafterHits("plain", "1", 0, 8))
REPORT = t.SessionReport(
    session="s-1",
    model="reference",
    verifier="v0",
    drafter="swift",
    drafter_version="7",
    committed_tokens=128,
    accepted_tokens=90,
    drafted_tokens=140,
    verified_tokens=131,
    steps=38,
    seconds=1.25,
    uplink_bytes=777,
    downlink_bytes=1 << 33,
    resumes=2,
    round_trip_s=0.0125,
    edge="pi",
    drafter_hits=HITS,
    prompt_class=3,
    link_class=2,
)
SAMPLING = t.Sampling(
    temperature=0.7,
    seed=(1 << 64) - 1,
    top_k=40,
    top_p=0.95,
    min_p=0.05,
    repetition_penalty=1.1,
    presence_penalty=-0.5,
    frequency_penalty=0.25,
    logit_bias=((5, -1.5), (300, 2.0)),
    allowed_tokens=(1, 200, 70000),
    max_tokens=99,
    stop_tokens=(2, 300),
    ignore_eos=True,
)
REQUEST = t.SteeringRequest("0123456789ab", t.SteeringPrecision.FLOAT16, 4)


class Example(NamedTuple):
    """A message, and how it travels."""

    message: Any
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


def _edge(frame: t.EdgeFrame) -> Example:
    return Example(frame, codec.encode_edge_frame, codec.decode_edge_frame)


def _status(*verifiers: VerifierStatus, **others: Any) -> Example:
    status = ClusterStatus(**{"verifiers": verifiers, "drafters": (), "leases_granted": 0, "recent": (), **others})
    return Example(status, encode_status, decode_status)


def _cloud(frame: t.CloudFrame) -> Example:
    return Example(frame, codec.encode_cloud_frame, codec.decode_cloud_frame)


EXAMPLES = {
    "open": _edge(
        t.Open(
            model="reference",
            tokenizer_sha256=HASH,
            prompt=(1, 128, 70000, t.MAX_TOKEN_ID),
            sampling=SAMPLING,
            session="s-1_A",
            committed=(9, 300),
            lease=b"\x00lease\xff",
            patience=t.Patience(0.25, 3),
            drafting=True,
            window=32,
            max_drafts=12,
            logp=True,
            protocol_version=2,
            logprobs=True,
            top_logprobs=5,
            keep_s=30.0,
            steering=REQUEST,
        )
    ),
    "open with a grammar": _edge(
        t.Open("m", HASH, (1,), t.Sampling(grammar=t.Grammar(t.GrammarKind.JSON_SCHEMA, '{"type": "object"}')), "s")
    ),
    "open that bids the verifier draft": _edge(t.Open("m", HASH, (1,), t.Sampling(), "s", drafts_here=8)),
    "open that allows learning": _edge(t.Open("m", HASH, (1,), t.Sampling(), "s", learning=t.Learning(3))),
    "open of a later stream": _edge(t.Open("m", HASH, (1,), t.Sampling(), "s", committed=(7,), epoch=3)),
    "open with min_tokens": _edge(t.Open("m", HASH, (1,), t.Sampling(min_tokens=100), "s")),
    "open that forbids n-grams": _edge(t.Open("m", HASH, (1,), t.Sampling(no_repeat_ngram_size=3), "s")),
    "open that asks for the prompt's log probabilities": _edge(
        t.Open("m", HASH, (1, 2), t.Sampling(), "s", prompt_logprobs=5)
    ),
    "open that asks for the rest of them": _edge(
        t.Open("m", HASH, (1, 2, 3), t.Sampling(), "s", prompt_logprobs=0, prompt_logprobs_from=2)
    ),
    "open that asks for them without others": _edge(t.Open("m", HASH, (1, 2), t.Sampling(), "s", prompt_logprobs=0)),
    "open of a quiet stream": _edge(t.Open("m", HASH, (1,), t.Sampling(), "s", quiet=t.QuietWire(40, 72))),
    "cell of an edge": Example(bytes(range(32)), codec.encode_edge_cell, codec.decode_edge_cell),
    "cell of a verifier": Example(bytes(range(32)), codec.encode_cloud_cell, codec.decode_cloud_cell),
    "log probabilities of a prompt": _cloud(
        t.PromptLogprobs(
            1,
            (t.TokenFacts(-0.5, 1, ((7, -0.5), (300, -1.5))), t.TokenFacts(-9.0, 70000, ((9, -0.25), (3, -2.0)))),
            epoch=3,
        )
    ),
    "log probabilities of a prompt without others": _cloud(t.PromptLogprobs(300, (t.TokenFacts(-0.5, 1),))),
    "ping": _edge(t.Ping(300)),
    "pong": _cloud(t.Pong(300, 3)),
    "opened of a later stream": _cloud(t.Opened(1, 64, 128, "v0", 4096, epoch=3)),
    "commit of a later stream": _cloud(t.Commit(9, tuple(map(t.CommittedToken, (1,))), 0, 64, epoch=3)),
    "goaway of a later stream": _cloud(t.Goaway("draining", 1.5, epoch=3)),
    "lease request of a suspicious edge": Example(
        t.LeaseRequest("reference", "s-1", avoid=("v1",), epoch=3, suspected=True),
        codec.encode_lease_request,
        codec.decode_lease_request,
    ),
    "open, least": _edge(t.Open("m", HASH, (1,), t.Sampling(), "s", drafting=False, logp=False)),
    "continue": _edge(t.Continue(start=300, prompt=(4, 5, 600), sampling=SAMPLING, chain=7)),
    "continue, least": _edge(t.Continue(0, ())),
    "draft": _edge(
        t.Draft(
            chain=3,
            start=1000,
            tokens=tuple(map(t.DraftToken, (7, 200, 70000), (0.5, 0.25, 1.0))),
            drafter="swift",
            drafter_version="7",
            complete=True,
        )
    ),
    "branches": _edge(t.Branches(3, (t.Branch(1000, (7, 200)), t.Branch(1001, (70000, 5, 6))))),
    "draft with branches": _edge(
        t.Draft(
            3,
            1000,
            tuple(map(t.DraftToken, (7, 200))),
            branches=(t.Branch(1000, (9,), 51 / 255), t.Branch(1001, (70000, 5), 1 / 255)),
        )
    ),
    "branches of known chances": _edge(t.Branches(3, (t.Branch(1000, (7, 200), 0.2),))),
    "open that allows trees": _edge(t.Open("m", HASH, (1,), t.Sampling(), "s", trees=True)),
    "open of a daemon's key": _edge(t.Open("m", HASH, (1,), t.Sampling(), "s", isolation=bytes(range(16)))),
    "open of a text that was promised 4096 positions": _edge(
        t.Open("m", HASH, (1,), t.Sampling(), "s", committed=(7,), context_length=4096)
    ),
    "open that asks for a gap and a first token": _edge(
        t.Open("m", HASH, (1,), t.Sampling(), "s", service=t.ServiceGoal(gap_s=0.075, first_token_s=0.5))
    ),
    "open of a batch": _edge(t.Open("m", HASH, (1,), t.Sampling(), "s", service=t.ServiceGoal(batch=True))),
    "open that asks to be interactive": _edge(t.Open("m", HASH, (1,), t.Sampling(), "s", service=t.ServiceGoal())),
    "opened with trees": _cloud(t.Opened(0, 64, 128, "v0", 4096, trees=True)),
    "commit of a tree": _cloud(t.Commit(9, tuple(map(t.CommittedToken, (1, 2))), 1, 64, verified=1, verified_beside=5)),
    "draft, least": _edge(t.Draft(0, 0, tuple(map(t.DraftToken, (1,))))),
    "report": _edge(t.Report(True, 0.0015, 0.02, 0.75, REQUEST)),
    "report, least": _edge(t.Report(False)),
    "cancel": _edge(t.Cancel("enough")),
    "cancel, least": _edge(t.Cancel()),
    "opened with a precision": _cloud(t.Opened(0, 64, 128, "v0", 4096, precision="bfloat16")),
    "opened by a verifier that knows min_tokens": _cloud(
        t.Opened(0, 64, 128, "v0", 4096, settings=("min_tokens",), eos_tokens=(2, 151645))
    ),
    "opened": _cloud(
        t.Opened(
            committed=2,
            credit=64,
            max_tokens=99,
            verifier="v0",
            context_length=4096,
            guarantee=t.Guarantee.BYTES_BY_TILES,
            vocab_size=32000,
            goal=t.Goal.EFFICIENCY,
            max_drafts=16,
            planned=True,
            keep_s=30.0,
            release="0.1.0+abc",
            steered=True,
        )
    ),
    "opened by a verifier that takes branches": _cloud(t.Opened(0, 64, 128, "v0", 4096, branches=True)),
    "opened by a verifier that drafts": _cloud(t.Opened(0, 64, 128, "v0", 4096, drafter_here="swift@7")),
    "opened, least": _cloud(t.Opened(0, 0, 0, "", 0, vocab_size=0, max_drafts=0, planned=False)),
    "commit": _cloud(
        t.Commit(
            start=1000,
            tokens=tuple(
                map(
                    t.CommittedToken,
                    (7, 200, 70000),
                    (-0.5, -0.25, -2.0),
                    (
                        t.TokenFacts(-0.75, 0, ((7, -0.75), (8, -1.5))),
                        t.TokenFacts(-0.125, 0, ((200, -0.125), (3, -3.0))),
                        t.TokenFacts(-4.0, 0, ((1, -0.5), (70000, -4.0))),
                    ),
                )
            ),
            accepted=2,
            credit=61,
            reward=0.875,
            steering=t.Steering(0.5, b"\x01\x02\xff\x80", t.SteeringPrecision.INT8),
            timing=t.Timing(5, 0.001, 0.002, 0.03),
            finish=t.FinishReason.STOP_TOKEN,
            chain=3,
            verified=4,
            turn=1,
        )
    ),
    "commit with ranks": _cloud(
        t.Commit(
            9,
            (t.CommittedToken(7, None, t.TokenFacts(-0.5, 1)), t.CommittedToken(8, None, t.TokenFacts(-9.0, 300))),
            1,
            64,
        )
    ),
    "commit with entropies": _cloud(t.Commit(9, (t.CommittedToken(7, None, t.TokenFacts(-0.5, 1, (), 0.75)),), 0, 64)),
    "commit with drafts of the verifier's own": _cloud(
        t.Commit(
            9,
            tuple(map(t.CommittedToken, (1, 2, 3))),
            2,
            64,
            timing=t.Timing(drafting_s=0.004),
            verified=4,
            verified_here=3,
            covered=7,
        )
    ),
    "commit, least": _cloud(t.Commit(0, tuple(map(t.CommittedToken, (1,))), 0, 0)),
    "commit, first of a turn": _cloud(t.Commit(9, tuple(map(t.CommittedToken, (1,))), 0, 0, cached_tokens=8)),
    "commit of the end alone": _cloud(t.Commit(5, (), 0, 0, finish=t.FinishReason.LENGTH)),
    "goaway": _cloud(t.Goaway("draining", 1.5)),
    "lease request": Example(
        t.LeaseRequest("reference", "s-1", HASH, ("v1", "v2"), 2, True, 3, 2, (7, 1 << 63)),
        codec.encode_lease_request,
        codec.decode_lease_request,
    ),
    "lease request of a text in float32": Example(
        t.LeaseRequest("reference", "s-1", precision="float32"), codec.encode_lease_request, codec.decode_lease_request
    ),
    "lease request of a text that needs 4096 positions": Example(
        t.LeaseRequest("reference", "s-1", context_length=4096), codec.encode_lease_request, codec.decode_lease_request
    ),
    "lease request that asks for a gap": Example(
        t.LeaseRequest("reference", "s-1", service=t.ServiceGoal(gap_s=0.075)),
        codec.encode_lease_request,
        codec.decode_lease_request,
    ),
    "lease request, least": Example(
        t.LeaseRequest("", "", protocol_version=0), codec.encode_lease_request, codec.decode_lease_request
    ),
    "lease": Example(
        t.Lease(
            token=b"\x00token\xff",
            verifier="v0",
            address="10.0.0.1:50051",
            expires_in_s=60.0,
            model="reference",
            tokenizer_sha256=HASH,
            tokenizer=FILE,
            drafters=MANIFESTS,
            prior=t.DraftingPrior(PRIORS),
            chat_template=t.RemoteFile("chat_template.jinja", "cd" * 32, 99),
            tls=True,
            tls_name="verifier.example",
            relayed=True,
            release="0.1.0",
        ),
        codec.encode_lease,
        codec.decode_lease,
    ),
    "lease that says the context": Example(
        t.Lease(b"", "v0", "", 0.0, "reference", HASH, context_length=4096), codec.encode_lease, codec.decode_lease
    ),
    "lease where no gap is kept": Example(
        t.Lease(b"", "v0", "", 0.0, "reference", HASH, service=t.ServiceGoal(gap_s=0.075), service_unkept=True),
        codec.encode_lease,
        codec.decode_lease,
    ),
    "lease that says when to look again": Example(
        t.Lease(b"", "v0", "", 0.0, "reference", HASH, ask_again_s=12.5), codec.encode_lease, codec.decode_lease
    ),
    "lease, least": Example(t.Lease(b"", "", "", 0.0, "", ""), codec.encode_lease, codec.decode_lease),
    "drafters": Example(MANIFESTS, codec.encode_drafters, codec.decode_drafters),
    "drafter query": Example(HASH, codec.encode_drafter_query, codec.decode_drafter_query),
    "fetch": Example((HASH, 1 << 20), lambda wanted: codec.encode_fetch(*wanted), codec.decode_fetch),
    "chunk": Example(b"\x00\x01chunk", codec.encode_chunk, codec.decode_chunk),
    "session report": Example(REPORT, codec.encode_report, codec.decode_report),
    "session report, least": Example(t.SessionReport("", "", ""), codec.encode_report, codec.decode_report),
    "status": _status(
        VerifierStatus(
            name="v0",
            address="10.0.0.1:50051",
            model="reference",
            state="ready",
            sessions=3,
            step_s=0.03,
            restarts=1,
            kv_pages_free=200,
            release="0.1.0",
            max_sessions=8,
            kv_pages=256,
            guarantee="bytes",
        ),
        VerifierStatus("v1", "", "reference", "down"),
        drafters=MANIFESTS,
        leases_granted=17,
        recent=(REPORT, t.SessionReport("s-2", "m", "v1")),
        relay=RelayStatus(2, 30, 4, 1, 1000, 1 << 34, 0.0001, 0.002),
        edges=(EdgeStatus("pi", REPORT, 2.5, 40),),
        acceptance=(ClassAcceptance("reference", 3, 2, PRIORS[0]),),
    ),
    "status with a precision": _status(VerifierStatus("v0", "", "reference", "down", precision="float32")),
    "status with a context": _status(VerifierStatus("v0", "", "reference", "down", context_length=4096)),
    "status with a release": _status(release="0.1.0"),
    "status with a server": _status(VerifierStatus("v0", "", "reference", "ready", server="vLLM")),
    "status with a gap": _status(VerifierStatus("v0", "", "reference", "ready", gap_s=0.05)),
    "status with versions": _status(
        drafters=(t.DrafterManifest("swift", "8", HASH, "reference", (), 0.25),),
        recent=(
            t.SessionReport("s-3", "reference", "v0", drafter_hits=(t.DrafterHits("swift", "8", 9, 12, 0.00025),)),
        ),
        versions=(
            VersionStatus(
                drafter="swift",
                version="8",
                state="current",
                share=0.25,
                why="new",
                age_s=60.5,
                against="7",
                texts=31,
                difference=-0.0125,
                evidence=1.5,
                acceptance=0.625,
                trials=800.0,
            ),
        ),
    ),
    "status with a drafter beside the target": _status(
        VerifierStatus(
            "v0",
            "",
            "reference",
            "down",
            drafter_here="general@27a9646b40d5",
            committed_tokens=1 << 33,
            drafted_here=5_000_000_000,
            verified_here=700,
            accepted_here=400,
            drafting_here_s=12.5,
        ),
    ),
    "status with a trainer": _status(
        trainers=(
            TrainerStatus(
                model="reference",
                state="waiting for idle time",
                drafter="general",
                version="8",
                sequence=3,
                load=0.875,
                waited_s=12.5,
                hurried=2,
                cpu_share=0.375,
                max_cpu_share=0.5,
                steps=160,
                positions=1 << 33,
                keys=9,
                waiting=1152,
                candidate=4,
                candidate_texts=37,
                candidate_difference=-0.0125,
                published=3,
                dropped=5,
            ),
            TrainerStatus("tiny", "loading"),
        ),
    ),
    "status, least": _status(),
    "drain": Example("v0", codec.encode_drain, codec.decode_drain),
    "drained": Example(5, codec.encode_drained, codec.decode_drained),
    "nothing": Example(None, codec.encode_nothing, codec.decode_nothing),
}
