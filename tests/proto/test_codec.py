"""Every message survives the wire; bytes of a stranger become a checked object or `InvalidArgument`."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hand_driven import committed
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.proto import codec
from outrider.proto import types as t
from outrider.proto.cluster_status import (
    ClassAcceptance,
    ClusterStatus,
    EdgeStatus,
    RelayStatus,
    VerifierStatus,
    decode_status,
    encode_status,
)
from outrider.proto.errors import InvalidArgument, ResourceExhausted
from outrider.proto.v1 import decoding_pb2 as pb

quick = settings(max_examples=60, deadline=None, derandomize=True)

ids = st.integers(0, t.MAX_TOKEN_ID)
tokens = st.lists(ids, max_size=20).map(tuple)
some_tokens = st.lists(ids, min_size=1, max_size=20).map(tuple)
distinct = st.lists(ids, max_size=8, unique=True).map(tuple)
counts = st.integers(0, (1 << 32) - 1)
big_counts = st.integers(0, (1 << 64) - 1)
singles = st.floats(width=32, allow_nan=False, allow_infinity=False)
doubles = st.floats(allow_nan=False, allow_infinity=False)
microseconds = counts.map(lambda n: n / 1e6)  # what travels exactly
words = st.text(max_size=20)
names = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)
hashes = st.from_regex(r"[0-9a-f]{64}", fullmatch=True)


def within(name: str, width: int = 64) -> st.SearchStrategy[float]:
    return st.floats(t.BOUNDS[name].low, t.BOUNDS[name].high, width=width)


biases = within("logit_bias", width=32)
samplings = st.builds(
    t.Sampling,
    temperature=st.just(0.0) | within("temperature"),
    seed=big_counts,
    top_k=ids,
    top_p=within("top_p"),
    min_p=within("min_p"),
    repetition_penalty=within("repetition_penalty"),
    presence_penalty=within("presence_penalty"),
    frequency_penalty=within("frequency_penalty"),
    logit_bias=distinct.flatmap(lambda ts: st.tuples(*(st.tuples(st.just(x), biases) for x in ts))),
    allowed_tokens=distinct,
    max_tokens=st.integers(1, t.MAX_TOKEN_ID),
    stop_tokens=tokens,
    ignore_eos=st.booleans(),
)
requests = st.builds(
    t.SteeringRequest, st.from_regex(r"[0-9a-f]{12}", fullmatch=True), st.sampled_from(t.SteeringPrecision), counts
)
opens = st.builds(
    t.Open,
    model=st.text(min_size=1, max_size=20),
    tokenizer_sha256=hashes,
    prompt=some_tokens,
    sampling=samplings.filter(lambda s: s.max_tokens > 20),
    session=names,
    committed=tokens,
    lease=st.binary(max_size=40),
    patience=st.none() | st.builds(t.Patience, st.floats(0, allow_nan=False), st.integers(1, (1 << 32) - 1)),
    drafting=st.booleans(),
    window=counts,
    max_drafts=counts,
    steering=st.none() | requests,
    logp=st.booleans(),
    protocol_version=counts,
    learning=st.none() | st.builds(t.Learning, st.integers(0, t.PROMPT_CLASSES - 1)),
    keep_s=microseconds,
)
continues = st.builds(t.Continue, counts, tokens, st.none() | samplings, st.integers(0, (1 << 31) - 1))


def runs_of(least: int) -> st.SearchStrategy[tuple[t.Branch, ...]]:
    """Return branches of `least` tokens or more, whose chances are all known, or none."""

    def some(chance) -> st.SearchStrategy[tuple[t.Branch, ...]]:
        tokens_of_one = st.lists(ids, min_size=least, max_size=9).map(tuple)
        return st.lists(st.builds(t.Branch, counts, tokens_of_one, chance), min_size=1, max_size=5).map(tuple)

    return some(st.just(math.nan)) | some(st.integers(0, 255).map(lambda share: share / 255))


@st.composite
def drafts(draw):
    content = draw(tokens)
    n = len(content)
    half = st.floats(0, 1, width=16)
    return t.Draft(
        chain=draw(counts),
        start=draw(counts),
        tokens=tuple(map(t.DraftToken, content, draw(st.just((math.nan,) * n) | st.tuples(*(half for _ in range(n)))))),
        branches=draw(st.just(()) | runs_of(1)),
        drafter=draw(words),
        drafter_version=draw(words),
        complete=not content or draw(st.booleans()),
    )


reports_of_edges = st.builds(
    t.Report, st.booleans(), microseconds, microseconds, st.floats(0, 1, width=32), st.none() | requests
)
vectors = st.builds(
    t.Steering,
    st.floats(2.0**-100, 2.0**100, width=32),
    st.integers(0, 8).flatmap(lambda n: st.binary(min_size=2 * n, max_size=2 * n)),
    st.sampled_from(t.SteeringPrecision),
)
branches = st.builds(t.Branches, counts, runs_of(1))
edge_frames = opens | continues | drafts() | branches | reports_of_edges | st.builds(t.Cancel, words)


@st.composite
def commits(draw):
    content = draw(some_tokens)
    n = len(content)
    of_each = st.just((None,) * n) | st.tuples(*(singles for _ in range(n)))
    facts = st.just((None,) * n) | st.tuples(
        *(st.builds(t.TokenFacts, singles, counts, st.just(()), singles) for _ in range(n))
    )
    return t.Commit(
        start=draw(counts),
        tokens=tuple(map(t.CommittedToken, content, draw(of_each), draw(facts))),
        accepted=draw(st.integers(0, n)),
        credit=draw(counts),
        reward=draw(st.none() | singles),
        steering=draw(st.none() | vectors),
        timing=draw(st.builds(t.Timing, counts, microseconds, microseconds, microseconds)),
        finish=draw(st.none() | st.sampled_from(t.FinishReason)),
        chain=draw(counts),
        verified=draw(counts),
        turn=draw(counts),
    )


cloud_frames = (
    commits()
    | st.builds(
        t.Opened,
        counts,
        counts,
        counts,
        words,
        counts,
        st.sampled_from(t.Guarantee),
        counts,
        st.sampled_from(t.Goal),
        counts,
        st.booleans(),
        steered=st.booleans(),
        keep_s=microseconds,
    )
    | st.builds(t.Goaway, words, doubles)
)
files = st.builds(t.RemoteFile, st.from_regex(r"[a-z0-9_][a-z0-9_.]{0,20}", fullmatch=True), hashes, big_counts)
manifests = st.builds(
    t.DrafterManifest, names, names, words, words, st.lists(files, max_size=3).map(tuple), st.floats(0, 1)
)
lease_requests = st.builds(
    t.LeaseRequest,
    words,
    words,
    words,
    st.lists(words, max_size=3).map(tuple),
    counts,
    st.booleans(),
    st.integers(0, t.PROMPT_CLASSES - 1),
    st.integers(0, t.LINK_CLASSES - 1),
    st.lists(big_counts, max_size=t.MAX_PREFIXES).map(tuple),
)
drafter_priors = st.builds(t.DrafterPrior, words, words, st.floats(0, 1), st.floats(0, allow_infinity=False))
leases = st.builds(
    t.Lease,
    token=st.binary(max_size=30),
    verifier=words,
    address=words,
    expires_in_s=doubles,
    model=words,
    tokenizer_sha256=words,
    tokenizer=st.none() | files,
    drafters=st.lists(manifests, max_size=2).map(tuple),
    prior=st.builds(t.DraftingPrior, st.lists(drafter_priors, max_size=3).map(tuple)),
    tls=st.booleans(),
    tls_name=words,
    relayed=st.booleans(),
)
relays = st.builds(RelayStatus, counts, big_counts, big_counts, big_counts, big_counts, big_counts, doubles, doubles)
reports = st.builds(
    t.SessionReport,
    words,
    words,
    words,
    words,
    words,
    big_counts,
    big_counts,
    big_counts,
    big_counts,
    big_counts,
    doubles,
    big_counts,
    big_counts,
    counts,
    doubles,
    words,
    st.lists(
        st.tuples(words, words, counts, counts).map(lambda h: t.DrafterHits(h[0], h[1], min(h[2:]), max(h[2:]))),
        max_size=3,
    ).map(tuple),
    st.integers(0, t.PROMPT_CLASSES - 1),
    st.integers(0, t.LINK_CLASSES - 1),
)
statuses = st.builds(
    ClusterStatus,
    st.lists(st.builds(VerifierStatus, words, words, words, words, counts, doubles, counts, counts), max_size=2).map(
        tuple
    ),
    st.lists(manifests, max_size=2).map(tuple),
    big_counts,
    st.lists(reports, max_size=2).map(tuple),
    st.none() | relays,
    st.lists(st.builds(EdgeStatus, words, reports, doubles, big_counts), max_size=2).map(tuple),
    st.lists(st.builds(ClassAcceptance, words, counts, counts, drafter_priors), max_size=2).map(tuple),
)

DECODERS = [
    codec.decode_edge_frame,
    codec.decode_cloud_frame,
    codec.decode_lease_request,
    codec.decode_lease,
    codec.decode_drafters,
    codec.decode_drafter_query,
    codec.decode_fetch,
    codec.decode_chunk,
    codec.decode_report,
    decode_status,
    codec.decode_drain,
    codec.decode_drained,
]


@quick
@given(edge_frames)
def test_every_frame_of_the_edge_survives_the_wire(frame):
    assert codec.decode_edge_frame(codec.encode_edge_frame(frame)) == frame


@quick
@given(cloud_frames)
def test_every_frame_of_the_cloud_survives_the_wire(frame):
    assert codec.decode_cloud_frame(codec.encode_cloud_frame(frame)) == frame


@quick
@given(lease_requests, leases)
def test_lease_requests_and_leases_survive_the_wire(request, lease):
    assert codec.decode_lease_request(codec.encode_lease_request(request)) == request
    assert codec.decode_lease(codec.encode_lease(lease)) == lease


@quick
@given(st.lists(manifests, max_size=3).map(tuple), words, hashes, big_counts, st.binary(max_size=50))
def test_what_serves_drafters_survives_the_wire(drafters, query, sha256, offset, chunk):
    assert codec.decode_drafters(codec.encode_drafters(drafters)) == drafters
    assert codec.decode_drafter_query(codec.encode_drafter_query(query)) == query
    assert codec.decode_fetch(codec.encode_fetch(sha256, offset)) == (sha256, offset)
    assert codec.decode_chunk(codec.encode_chunk(chunk)) == chunk


@quick
@given(reports, statuses, words, counts)
def test_reports_and_status_survive_the_wire(report, status, verifier, sessions):
    assert codec.decode_report(codec.encode_report(report)) == report
    assert decode_status(encode_status(status)) == status
    assert codec.decode_drain(codec.encode_drain(verifier)) == verifier
    assert codec.decode_drained(codec.encode_drained(sessions)) == sessions


def test_a_drafter_update_reads_as_a_list_of_drafters_and_a_watch_as_a_query():
    manifest = t.DrafterManifest("a", "1", "x", "y", ())
    data = codec.encode_drafters((manifest,))
    assert pb.DrafterUpdate.FromString(data).SerializeToString() == data
    query = codec.encode_drafter_query("abc")
    assert pb.WatchDraftersRequest.FromString(query).tokenizer_sha256 == "abc"


@pytest.mark.parametrize("decode", DECODERS)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.binary(max_size=60))
def test_random_bytes_raise_nothing_but_invalid_argument(decode, data):
    caught = None
    try:
        decode(data)
    except InvalidArgument as error:
        caught = error
    assert caught is None or caught.field, "the field at fault is named"


def wire_draft(**fields):
    return pb.EdgeFrame(draft=pb.Draft(**({"start": 1, "tokens": [1, 2]} | fields))).SerializeToString()


def wire_branches(**fields):
    return pb.EdgeFrame(branches=pb.Branches(chain=1, **fields)).SerializeToString()


def wire_open(**sampling):
    wire = pb.EdgeFrame(open=pb.Open(session="s", model="m", tokenizer_sha256="0" * 64, prompt=[1]))
    fields = {"top_p": 1.0, "repetition_penalty": 1.0, "max_tokens": 1} | sampling
    wire.open.sampling.CopyFrom(pb.Sampling(**fields))
    return wire


def wire_learning(prompt_class):
    wire = wire_open()
    wire.open.learning.prompt_class = prompt_class
    return wire.SerializeToString()


def wire_request(**fields):
    request = {"projection": "0123456789ab", "precision": "PRECISION_INT8", "every": 1} | fields
    return pb.EdgeFrame(report=pb.Report(steering=pb.SteeringRequest(**request))).SerializeToString()


def wire_vector(**fields):
    vector = {"scale": 1.0, "values": b"ab", "precision": "PRECISION_FLOAT16"} | fields
    return pb.CloudFrame(commit=pb.Commit(tokens=[1], steering=pb.Steering(**vector)))


def wire_prior(**fields):
    return pb.Lease(prior=pb.DraftingPrior(drafters=[pb.DrafterPrior(**fields)]))


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"", "frame.body"),
        (b"\xff", "frame"),
        (wire_draft(q=b"abc"), "draft.q"),
        (wire_draft(q=np.array([np.nan, 0.5], "<f2").tobytes()), "draft.q"),
        (wire_draft(q=np.array([0.5, np.nan], "<f2").tobytes()), "draft.q"),
        (wire_draft(q=np.array([np.nan, np.nan], "<f2").tobytes()), "draft.q"),
        (wire_draft(q=np.array([-0.5, 0.5], "<f2").tobytes()), "draft.q"),
        (wire_draft(q=np.array([1.5, 0.5], "<f2").tobytes()), "draft.q"),
        (wire_draft(q=b"\0\0"), "draft.q"),
        (wire_draft(tokens=[1 << 31]), "draft.tokens"),
        (wire_draft(tokens=[]), "draft.tokens"),
        (wire_draft(branches=pb.Branches(starts=[4], lengths=[0])), "draft.branches.lengths"),
        (wire_draft(branches=pb.Branches(starts=[4], lengths=[2], tokens=[5])), "draft.branches.lengths"),
        (wire_draft(branches=pb.Branches(starts=[4], lengths=[1], tokens=[1 << 31])), "draft.branches.tokens"),
        (
            wire_draft(branches=pb.Branches(starts=[4], lengths=[1], tokens=[5], chances=b"ab")),
            "draft.branches.chances",
        ),
        (wire_branches(), "branches.starts"),
        (wire_branches(starts=[4], lengths=[0], tokens=[]), "branches.lengths"),
        (wire_branches(starts=[4], lengths=[1], tokens=[5], chances=b"ab"), "branches.chances"),
        (wire_branches(starts=[4], lengths=[2, 2], tokens=[5, 6, 7, 8]), "branches.lengths"),
        (wire_branches(starts=[4, 5], lengths=[2, 3], tokens=[5, 6, 7, 8]), "branches.lengths"),
        (wire_branches(starts=[4], lengths=[2], tokens=[5, 1 << 31]), "branches.tokens"),
        (pb.EdgeFrame(open=pb.Open(session="s")).SerializeToString(), "open.sampling"),
        (wire_open(bias_tokens=[1], bias_values=[]).SerializeToString(), "sampling.bias_values"),
        (wire_open(bias_tokens=[1], bias_values=[math.inf]).SerializeToString(), "sampling.bias_values"),
        (wire_open(top_p=0.0).SerializeToString(), "sampling.top_p"),
        (wire_open(max_tokens=0).SerializeToString(), "sampling.max_tokens"),
        (pb.EdgeFrame(report=pb.Report(acceptance=1.5)).SerializeToString(), "report.acceptance"),
        (pb.EdgeFrame(report=pb.Report(acceptance=math.nan)).SerializeToString(), "report.acceptance"),
        (wire_learning(t.PROMPT_CLASSES), "learning.prompt_class"),
        (wire_request(projection=""), "steering.projection"),
        (wire_request(projection="0123456789AB"), "steering.projection"),
        (wire_request(projection="0123456789ab\n"), "steering.projection"),
        (wire_request(precision="PRECISION_UNSPECIFIED"), "steering.precision"),
    ],
)
def test_a_frame_of_the_edge_that_means_nothing_names_its_field(data, field):
    with pytest.raises(InvalidArgument) as caught:
        codec.decode_edge_frame(data)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("wire", "field"),
    [
        (pb.CloudFrame(), "frame.body"),
        (pb.CloudFrame(commit=pb.Commit(start=1)), "commit.tokens"),
        (pb.CloudFrame(commit=pb.Commit(tokens=[1], accepted=2)), "commit.accepted"),
        (pb.CloudFrame(commit=pb.Commit(tokens=[1], logp=[0.0, 0.0])), "commit.logp"),
        (pb.CloudFrame(opened=pb.Opened()), "opened.goal"),
        (pb.CloudFrame(commit=pb.Commit(tokens=[1], steering=pb.Steering())), "steering.precision"),
        (wire_vector(scale=0.0), "steering.scale"),
        (wire_vector(scale=-1.0), "steering.scale"),
        (wire_vector(scale=math.nan), "steering.scale"),
        (wire_vector(scale=math.inf), "steering.scale"),
        (wire_vector(values=b"abc"), "steering.values"),
    ],
)
def test_a_frame_of_the_cloud_that_means_nothing_names_its_field(wire, field):
    with pytest.raises(InvalidArgument) as caught:
        codec.decode_cloud_frame(wire.SerializeToString())
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("frame", "field"),
    [
        (t.Open("m", "ab" * 32, (1,) * 21, t.Sampling(), "s"), "open.prompt"),
        (t.Open("m", "ab" * 32, (1,), t.Sampling(allowed_tokens=tuple(range(21))), "s"), "sampling.allowed_tokens"),
    ],
)
def test_a_list_longer_than_can_make_sense_is_refused(frame, field):
    data = codec.encode_edge_frame(frame)
    assert codec.decode_edge_frame(data, 21) == frame
    with pytest.raises(InvalidArgument) as caught:
        codec.decode_edge_frame(data, 10)
    assert caught.value.field == field


def one_branch(**fields):
    return {"starts": [4], "lengths": [1], "tokens": [5]} | fields


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tokens": [5] * 9}, "draft.tokens"),
        ({"tokens": [5], "q": bytes(17)}, "draft.q"),
        ({"branches": one_branch(starts=[4] * 65)}, "draft.branches.starts"),
        ({"branches": one_branch(lengths=[1] * 65)}, "draft.branches.lengths"),
        ({"branches": one_branch(lengths=[9])}, "draft.branches.lengths"),
        ({"branches": one_branch(tokens=[5] * (64 * 8 + 1))}, "draft.branches.tokens"),
        ({"branches": one_branch(chances=bytes(65))}, "draft.branches.chances"),
    ],
)
def test_more_drafts_than_any_credit_allows_are_refused_before_a_list_is_made(fields, field, monkeypatch):
    def never(*_):
        raise AssertionError("a list is made of them")

    monkeypatch.setitem(codec._FROM_EDGE, "draft", never)
    monkeypatch.setitem(codec._FROM_EDGE, "branches", never)
    frames = [(pb.EdgeFrame(draft=pb.Draft(**fields)), field)]
    if "branches" in fields:
        frames.append((pb.EdgeFrame(branches=pb.Branches(**fields["branches"])), field.removeprefix("draft.")))
    for wire, named in frames:
        with pytest.raises(ResourceExhausted) as caught:
            codec.decode_edge_frame(wire.SerializeToString(), max_credit=8)
        assert caught.value.field == named


@pytest.mark.parametrize(
    ("wire", "most"),
    [
        (pb.EdgeFrame(draft=pb.Draft(start=1, tokens=[5])), 64 * 1024),
        (pb.EdgeFrame(branches=pb.Branches(starts=[4], lengths=[2], tokens=[5, 6])), 64 * 1024),
        (pb.EdgeFrame(report=pb.Report(drafting=True)), 4096),
        (pb.EdgeFrame(cancel=pb.Cancel(reason="r")), 4096),
        (pb.EdgeFrame(ping=pb.Ping(number=1)), 4096),
    ],
)
def test_only_what_brings_a_prompt_may_have_many_bytes(wire, most):
    """Fields that this version does not know count, too."""
    data = wire.SerializeToString()
    unknown = most - len(data) - 5  # in a field of number 100, whose head takes five bytes
    padded = data + b"\xa2\x06" + bytes([unknown & 127 | 128, unknown >> 7 & 127 | 128, unknown >> 14]) + bytes(unknown)
    assert len(padded) == most
    assert codec.decode_edge_frame(padded) == codec.decode_edge_frame(data)
    with pytest.raises(InvalidArgument) as caught:
        codec.decode_edge_frame(padded + b"\xa0\x06\x01")
    assert caught.value.field == f"frame.{wire.WhichOneof('body')}"


@pytest.mark.parametrize(
    ("decode", "wire", "field"),
    [
        (codec.decode_lease_request, pb.LeaseRequest(prompt_class=t.PROMPT_CLASSES), "lease_request.prompt_class"),
        (codec.decode_lease_request, pb.LeaseRequest(link_class=t.LINK_CLASSES), "lease_request.link_class"),
        (codec.decode_lease_request, pb.LeaseRequest(prefixes=[1] * (t.MAX_PREFIXES + 1)), "lease_request.prefixes"),
        (codec.decode_report, pb.SessionReport(prompt_class=t.PROMPT_CLASSES), "report.prompt_class"),
        (codec.decode_report, pb.SessionReport(link_class=t.LINK_CLASSES), "report.link_class"),
        (codec.decode_report, pb.SessionReport(drafter_hits=[pb.DrafterHits(hits=1)]), "report.drafter_hits"),
        (codec.decode_report, pb.SessionReport(drafter_hits=[pb.DrafterHits()] * 17), "report.drafter_hits"),
        (codec.decode_lease, wire_prior(acceptance=1.5), "prior.acceptance"),
        (codec.decode_lease, wire_prior(acceptance=math.nan), "prior.acceptance"),
        (codec.decode_lease, wire_prior(trials=-1.0), "prior.trials"),
        (codec.decode_lease, wire_prior(trials=math.inf), "prior.trials"),
        (codec.decode_lease, pb.Lease(prior=pb.DraftingPrior(drafters=[pb.DrafterPrior()] * 17)), "prior.drafters"),
    ],
)
def test_what_cannot_be_known_of_drafters_names_its_field(decode, wire, field):
    with pytest.raises(InvalidArgument) as caught:
        decode(wire.SerializeToString())
    assert caught.value.field == field


def test_an_unknown_finish_reason_is_refused():
    wire = pb.CloudFrame(commit=pb.Commit(tokens=[1])).SerializeToString()
    unknown = bytes([wire[0], wire[1] + 2]) + wire[2:] + b"\x48\x63"  # field 9, value 99
    with pytest.raises(InvalidArgument) as caught:
        codec.decode_cloud_frame(unknown)
    assert caught.value.field == "commit.finish"


@pytest.mark.parametrize(
    ("seconds", "carried"), [(-0.001, 0.0), (1.0000004, 1.0), (2e-7, 0.0), (1e9, 0xFFFFFFFF / 1e6)]
)
def test_a_duration_travels_in_whole_microseconds_clamped_to_its_range(seconds, carried):
    commit = t.Commit(1, committed(2), 0, 1, timing=t.Timing(1, seconds, seconds, seconds))
    assert codec.decode_cloud_frame(codec.encode_cloud_frame(commit)).timing == t.Timing(1, carried, carried, carried)


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a\\b", ".hidden"])
def test_a_file_name_that_leaves_its_folder_is_refused(name):
    wire = pb.Lease(tokenizer=pb.RemoteFile(name=name, sha256="0" * 64))
    with pytest.raises(InvalidArgument) as caught:
        codec.decode_lease(wire.SerializeToString())
    assert caught.value.field == "file.name"
