"""Domain types to protobuf bytes and back. Nothing else converts; nothing else needs to.

Bytes from a stranger either become a checked domain object or raise `InvalidArgument` that names the field.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from outrider.proto import types as t
from outrider.proto.errors import InvalidArgument, PromptTooLong
from outrider.proto.v1 import decoding_pb2 as pb

DECODE_METHOD = "/outrider.proto.v1.Decoding/Decode"
CONTROL_SERVICE = "outrider.proto.v1.Control"
DECODING_SERVICE = "outrider.proto.v1.Decoding"

M = TypeVar("M", bound=Message)


def _parse(kind: Callable[[], M], data: bytes) -> M:
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise InvalidArgument(f"is not a {message.DESCRIPTOR.full_name} message", field="frame") from error
    return message


# --- the decoding stream, edge to cloud -------------------------------------------------------------------------


def encode_edge_frame(frame: t.EdgeFrame) -> bytes:
    """One `EdgeFrame` message."""
    match frame:
        case t.Draft():
            wire = pb.EdgeFrame(draft=_draft_to_wire(frame))
        case t.Open():
            wire = pb.EdgeFrame(open=_open_to_wire(frame))
        case t.Continue():
            wire = pb.EdgeFrame(continuation=_continue_to_wire(frame))
        case t.Report():
            wire = pb.EdgeFrame(
                report=pb.Report(
                    drafting=frame.drafting,
                    drafting_us=_microseconds(frame.drafting_s),
                    round_trip_us=_microseconds(frame.round_trip_s),
                    acceptance=frame.acceptance,
                    steering=_wish_to_wire(frame.steering),
                )
            )
        case t.Cancel():
            wire = pb.EdgeFrame(cancel=pb.Cancel(reason=frame.reason))
    return wire.SerializeToString()


def decode_edge_frame(data: bytes, most_tokens: int = t.MAX_TOKEN_ID) -> t.EdgeFrame:
    """The frame in `data`.

    Args:
        data: of one message.
        most_tokens: that any list in it may hold, looked at before a list is built, so that a stranger's message
            cannot hold a server up.

    Raises:
        InvalidArgument: with the field named.
    """
    wire = _parse(pb.EdgeFrame, data)
    _check_lengths(wire, most_tokens)
    match wire.WhichOneof("body"):
        case "draft":
            return _draft_from_wire(wire.draft)
        case "open":
            return _open_from_wire(wire.open)
        case "continuation":
            return _continue_from_wire(wire.continuation)
        case "report":
            report = wire.report
            return t.Report(
                report.drafting,
                report.drafting_us / 1e6,
                report.round_trip_us / 1e6,
                report.acceptance,
                _wish_from_wire(report),
            )
        case "cancel":
            return t.Cancel(wire.cancel.reason)
    raise InvalidArgument("holds none of open, continuation, draft, report, cancel", field="frame.body")


def _check_lengths(wire: pb.EdgeFrame, most_tokens: int) -> None:
    sampling = wire.continuation.sampling if wire.HasField("continuation") else wire.open.sampling
    lists = {
        "open.prompt": wire.open.prompt,
        "open.committed": wire.open.committed,
        "sampling.bias_tokens": sampling.bias_tokens,
        "sampling.bias_values": sampling.bias_values,
        "sampling.allowed_tokens": sampling.allowed_tokens,
        "sampling.stop_tokens": sampling.stop_tokens,
        "continuation.prompt": wire.continuation.prompt,
        "draft.tokens": wire.draft.tokens,
        "draft.parents": wire.draft.parents,
        "draft.q": wire.draft.q,
    }
    for field, values in lists.items():
        if len(values) > 2 * most_tokens:  # twice: q has two bytes a token
            error = PromptTooLong if field.endswith(".prompt") else InvalidArgument
            raise error(f"holds {len(values)} entries; {most_tokens} is the most that can make sense", field=field)


def _draft_to_wire(draft: t.Draft) -> pb.Draft:
    return pb.Draft(
        chain=draft.chain,
        start=draft.start,
        tokens=draft.tokens,
        parents=draft.parents,
        q=np.asarray(draft.q, dtype="<f2").tobytes(),
        drafter=draft.drafter,
        drafter_version=draft.drafter_version,
        complete=draft.complete,
    )


def _draft_from_wire(wire: pb.Draft) -> t.Draft:
    if len(wire.q) % 2:
        raise InvalidArgument("must be 2 bytes a token", field="draft.q")
    return t.Draft(
        chain=wire.chain,
        start=wire.start,
        tokens=tuple(wire.tokens),
        parents=tuple(wire.parents),
        q=tuple(np.frombuffer(wire.q, dtype="<f2").astype(float).tolist()),
        drafter=wire.drafter,
        drafter_version=wire.drafter_version,
        complete=wire.complete,
    )


def _open_to_wire(frame: t.Open) -> pb.Open:
    wire = pb.Open(
        protocol_version=frame.protocol_version,
        lease=frame.lease,
        session=frame.session,
        model=frame.model,
        tokenizer_sha256=frame.tokenizer_sha256,
        sampling=_sampling_to_wire(frame.sampling),
        prompt=frame.prompt,
        committed=frame.committed,
        drafting=frame.drafting,
        window=frame.window,
        max_drafts=frame.max_drafts,
        logp=frame.logp,
        logprobs=frame.logprobs,
        top_logprobs=frame.top_logprobs,
        keep_s=frame.keep_s,
        steering=_wish_to_wire(frame.steering),
    )
    if frame.patience is not None:
        wire.patience.CopyFrom(pb.Patience(seconds=frame.patience.seconds, drafts=frame.patience.drafts))
    return wire


def _open_from_wire(wire: pb.Open) -> t.Open:
    if not wire.HasField("sampling"):
        raise InvalidArgument("is missing", field="open.sampling")
    patience = t.Patience(wire.patience.seconds, wire.patience.drafts) if wire.HasField("patience") else None
    return t.Open(
        protocol_version=wire.protocol_version,
        lease=wire.lease,
        session=wire.session,
        model=wire.model,
        tokenizer_sha256=wire.tokenizer_sha256,
        sampling=_sampling_from_wire(wire.sampling),
        prompt=tuple(wire.prompt),
        committed=tuple(wire.committed),
        patience=patience,
        drafting=wire.drafting,
        window=wire.window,
        max_drafts=wire.max_drafts,
        logp=wire.logp,
        logprobs=wire.logprobs,
        top_logprobs=wire.top_logprobs,
        keep_s=wire.keep_s,
        steering=_wish_from_wire(wire),
    )


def _wish_to_wire(wish: t.SteeringWish | None) -> pb.SteeringWish | None:
    if wish is None:
        return None
    precision = pb.Steering.Precision.Name(wish.precision.value)
    return pb.SteeringWish(projection=wish.projection, precision=precision, every=wish.every)


def _wish_from_wire(wire: pb.Open | pb.Report) -> t.SteeringWish | None:
    if not wire.HasField("steering"):
        return None
    wish = wire.steering
    precision = _enum(t.SteeringPrecision, wish.precision, "steering.precision")
    return t.SteeringWish(wish.projection, precision, wish.every)


def _continue_to_wire(frame: t.Continue) -> pb.Continue:
    wire = pb.Continue(start=frame.start, prompt=frame.prompt, chain=frame.chain)
    if frame.sampling is not None:
        wire.sampling.CopyFrom(_sampling_to_wire(frame.sampling))
    return wire


def _continue_from_wire(wire: pb.Continue) -> t.Continue:
    return t.Continue(
        start=wire.start,
        prompt=tuple(wire.prompt),
        sampling=_sampling_from_wire(wire.sampling) if wire.HasField("sampling") else None,
        chain=wire.chain,
    )


def _sampling_to_wire(sampling: t.Sampling) -> pb.Sampling:
    return pb.Sampling(
        temperature=sampling.temperature,
        seed=sampling.seed,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        bias_tokens=[token for token, _ in sampling.logit_bias],
        bias_values=[bias for _, bias in sampling.logit_bias],
        allowed_tokens=sampling.allowed_tokens,
        max_tokens=sampling.max_tokens,
        stop_tokens=sampling.stop_tokens,
        ignore_eos=sampling.ignore_eos,
        grammar=_grammar_to_wire(sampling.grammar) if sampling.grammar is not None else None,
    )


def _grammar_to_wire(grammar: t.Grammar) -> pb.Grammar:
    return pb.Grammar(kind=pb.GrammarKind.Name(grammar.kind.value), text=grammar.text)


def _sampling_from_wire(wire: pb.Sampling) -> t.Sampling:
    if len(wire.bias_tokens) != len(wire.bias_values):
        raise InvalidArgument("must hold one value for each of bias_tokens", field="sampling.bias_values")
    return t.Sampling(
        temperature=wire.temperature,
        seed=wire.seed,
        top_k=wire.top_k,
        top_p=wire.top_p,
        min_p=wire.min_p,
        repetition_penalty=wire.repetition_penalty,
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
        logit_bias=tuple(zip(wire.bias_tokens, wire.bias_values, strict=True)),
        allowed_tokens=tuple(wire.allowed_tokens),
        max_tokens=wire.max_tokens,
        stop_tokens=tuple(wire.stop_tokens),
        ignore_eos=wire.ignore_eos,
        grammar=_grammar_from_wire(wire.grammar) if wire.HasField("grammar") else None,
    )


def _grammar_from_wire(wire: pb.Grammar) -> t.Grammar:
    return t.Grammar(_enum(t.GrammarKind, wire.kind, "sampling.grammar"), wire.text)


# --- the decoding stream, cloud to edge -------------------------------------------------------------------------


def encode_cloud_frame(frame: t.CloudFrame) -> bytes:
    """One `CloudFrame` message."""
    match frame:
        case t.Commit():
            wire = pb.CloudFrame(commit=_commit_to_wire(frame))
        case t.Opened():
            wire = pb.CloudFrame(
                opened=pb.Opened(
                    committed=frame.committed,
                    credit=frame.credit,
                    max_tokens=frame.max_tokens,
                    verifier=frame.verifier,
                    context_length=frame.context_length,
                    batch_invariant=frame.batch_invariant,
                    vocab_size=frame.vocab_size,
                    goal=pb.Goal.Name(frame.goal.value),
                    max_drafts=frame.max_drafts,
                    planned=frame.planned,
                    keep_s=frame.keep_s,
                    release=frame.release,
                    steered=frame.steered,
                )
            )
        case t.Goaway():
            wire = pb.CloudFrame(goaway=pb.Goaway(reason=frame.reason, retry_after_s=frame.retry_after_s))
    return wire.SerializeToString()


def decode_cloud_frame(data: bytes) -> t.CloudFrame:
    """The frame in `data`; raises `InvalidArgument`."""
    wire = _parse(pb.CloudFrame, data)
    match wire.WhichOneof("body"):
        case "commit":
            return _commit_from_wire(wire.commit)
        case "opened":
            o = wire.opened
            return t.Opened(
                committed=o.committed,
                credit=o.credit,
                max_tokens=o.max_tokens,
                verifier=o.verifier,
                context_length=o.context_length,
                batch_invariant=o.batch_invariant,
                vocab_size=o.vocab_size,
                goal=_enum(t.Goal, o.goal, "opened.goal"),
                max_drafts=o.max_drafts,
                planned=o.planned,
                keep_s=o.keep_s,
                release=o.release,
                steered=o.steered,
            )
        case "goaway":
            return t.Goaway(wire.goaway.reason, wire.goaway.retry_after_s)
    raise InvalidArgument("holds none of opened, commit, goaway", field="frame.body")


def _commit_to_wire(commit: t.Commit) -> pb.Commit:
    wire = pb.Commit(
        start=commit.start,
        tokens=commit.tokens,
        accepted=commit.accepted,
        logp=commit.logp,
        reward=commit.reward,
        credit=commit.credit,
        timing=pb.Timing(
            echo=commit.timing.echo,
            hold_us=_microseconds(commit.timing.hold_s),
            queue_us=_microseconds(commit.timing.queue_s),
            verify_us=_microseconds(commit.timing.verify_s),
        ),
        finish=pb.FinishReason.Name(commit.finish.value if commit.finish else 0),
        chain=commit.chain,
        judged=commit.judged,
        turn=commit.turn,
        logprobs=commit.logprobs,
        top_tokens=[token for top in commit.top_logprobs for token, _ in top],
        top_logp=[logp for top in commit.top_logprobs for _, logp in top],
    )
    if commit.steering is not None:
        s = commit.steering
        precision = pb.Steering.Precision.Name(s.precision.value)
        wire.steering.CopyFrom(pb.Steering(scale=s.scale, values=s.values, precision=precision))
    return wire


def _microseconds(seconds: float) -> int:
    return min(0xFFFFFFFF, max(0, round(seconds * 1e6)))


def _commit_from_wire(wire: pb.Commit) -> t.Commit:
    return t.Commit(
        start=wire.start,
        tokens=tuple(wire.tokens),
        accepted=wire.accepted,
        logp=tuple(wire.logp),
        reward=wire.reward if wire.HasField("reward") else None,
        steering=_steering_from_wire(wire.steering) if wire.HasField("steering") else None,
        credit=wire.credit,
        timing=t.Timing(
            wire.timing.echo, wire.timing.hold_us / 1e6, wire.timing.queue_us / 1e6, wire.timing.verify_us / 1e6
        ),
        finish=_enum(t.FinishReason, wire.finish, "commit.finish") if wire.finish else None,
        chain=wire.chain,
        judged=wire.judged,
        turn=wire.turn,
        logprobs=tuple(wire.logprobs),
        top_logprobs=_top_logprobs_from_wire(wire),
    )


def _top_logprobs_from_wire(wire: pb.Commit) -> tuple[t.TopLogprobs, ...]:
    if not wire.top_tokens and not wire.top_logp:
        return ()
    each, odd = divmod(len(wire.top_tokens), max(1, len(wire.tokens)))
    if odd or each == 0 or len(wire.top_logp) != len(wire.top_tokens):
        raise InvalidArgument("must hold equally many tokens and numbers for each token", field="commit.top_logprobs")
    pairs = list(zip(wire.top_tokens, wire.top_logp, strict=True))
    return tuple(tuple(pairs[first : first + each]) for first in range(0, len(pairs), each))


def _steering_from_wire(wire: pb.Steering) -> t.Steering:
    precision = _enum(t.SteeringPrecision, wire.precision, "steering.precision")
    return t.Steering(wire.scale, wire.values, precision)


def _enum(kind: Any, number: int, field: str) -> Any:
    try:
        return kind(number)
    except ValueError as error:
        raise InvalidArgument(f"{number} is not a {kind.__name__}", field=field) from error


# --- the control plane ------------------------------------------------------------------------------------------


def _file_to_wire(file: t.RemoteFile) -> pb.RemoteFile:
    return pb.RemoteFile(name=file.name, sha256=file.sha256, bytes=file.bytes)


def _file_from_wire(wire: pb.RemoteFile) -> t.RemoteFile:
    return t.RemoteFile(wire.name, wire.sha256, wire.bytes)


def _manifest_to_wire(manifest: t.DrafterManifest) -> pb.DrafterManifest:
    return pb.DrafterManifest(
        name=manifest.name,
        version=manifest.version,
        tokenizer_sha256=manifest.tokenizer_sha256,
        target=manifest.target,
        files=[_file_to_wire(file) for file in manifest.files],
    )


def _manifest_from_wire(wire: pb.DrafterManifest) -> t.DrafterManifest:
    return t.DrafterManifest(
        wire.name, wire.version, wire.tokenizer_sha256, wire.target, tuple(_file_from_wire(f) for f in wire.files)
    )


def encode_lease_request(request: t.LeaseRequest) -> bytes:
    """One `LeaseRequest` message."""
    return pb.LeaseRequest(
        model=request.model,
        tokenizer_sha256=request.tokenizer_sha256,
        session=request.session,
        avoid=request.avoid,
        protocol_version=request.protocol_version,
        inquiry=request.inquiry,
        prompt_class=request.prompt_class,
        link_class=request.link_class,
    ).SerializeToString()


def decode_lease_request(data: bytes) -> t.LeaseRequest:
    """The request in `data`; raises `InvalidArgument`."""
    wire = _parse(pb.LeaseRequest, data)
    return t.LeaseRequest(
        model=wire.model,
        session=wire.session,
        tokenizer_sha256=wire.tokenizer_sha256,
        avoid=tuple(wire.avoid),
        protocol_version=wire.protocol_version,
        inquiry=wire.inquiry,
        prompt_class=wire.prompt_class,
        link_class=wire.link_class,
    )


def encode_lease(lease: t.Lease) -> bytes:
    """One `Lease` message."""
    wire = pb.Lease(
        token=lease.token,
        verifier=lease.verifier,
        address=lease.address,
        expires_in_s=lease.expires_in_s,
        model=lease.model,
        tokenizer_sha256=lease.tokenizer_sha256,
        drafters=[_manifest_to_wire(manifest) for manifest in lease.drafters],
        prior=pb.DraftingPrior(
            acceptance=lease.prior.acceptance,
            step_s=lease.prior.step_s,
            drafters=[_drafter_prior_to_wire(drafter) for drafter in lease.prior.drafters],
        ),
        tls=lease.tls,
        tls_name=lease.tls_name,
        relayed=lease.relayed,
        release=lease.release,
    )
    if lease.tokenizer is not None:
        wire.tokenizer.CopyFrom(_file_to_wire(lease.tokenizer))
    if lease.chat_template is not None:
        wire.chat_template.CopyFrom(_file_to_wire(lease.chat_template))
    return wire.SerializeToString()


def decode_lease(data: bytes) -> t.Lease:
    """The lease in `data`; raises `InvalidArgument`."""
    wire = _parse(pb.Lease, data)
    return t.Lease(
        token=wire.token,
        verifier=wire.verifier,
        address=wire.address,
        expires_in_s=wire.expires_in_s,
        model=wire.model,
        tokenizer_sha256=wire.tokenizer_sha256,
        tokenizer=_file_from_wire(wire.tokenizer) if wire.HasField("tokenizer") else None,
        drafters=tuple(_manifest_from_wire(m) for m in wire.drafters),
        prior=_prior_from_wire(wire.prior),
        chat_template=_file_from_wire(wire.chat_template) if wire.HasField("chat_template") else None,
        tls=wire.tls,
        tls_name=wire.tls_name,
        relayed=wire.relayed,
        release=wire.release,
    )


def _prior_from_wire(wire: pb.DraftingPrior) -> t.DraftingPrior:
    _check_told(wire.drafters, "prior.drafters")
    return t.DraftingPrior(
        wire.acceptance, wire.step_s, tuple(_drafter_prior_from_wire(drafter) for drafter in wire.drafters)
    )


def _drafter_prior_to_wire(prior: t.DrafterPrior) -> pb.DrafterPrior:
    return pb.DrafterPrior(
        drafter=prior.drafter,
        drafter_version=prior.drafter_version,
        acceptance=prior.acceptance,
        trials=prior.trials,
    )


def _drafter_prior_from_wire(wire: pb.DrafterPrior) -> t.DrafterPrior:
    return t.DrafterPrior(wire.drafter, wire.drafter_version, wire.acceptance, wire.trials)


def _check_told(entries: Sized, field: str) -> None:
    """Before a list is built, so that a stranger's message cannot hold a server up."""
    if len(entries) > t.MOST_DRAFTERS_TOLD:
        raise InvalidArgument(f"holds {len(entries)} entries; {t.MOST_DRAFTERS_TOLD} are the most", field=field)


def encode_drafters(manifests: tuple[t.DrafterManifest, ...]) -> bytes:
    """One `ListDraftersReply` (or `DrafterUpdate`, which has the same shape) message."""
    return pb.ListDraftersReply(drafters=[_manifest_to_wire(manifest) for manifest in manifests]).SerializeToString()


def decode_drafters(data: bytes) -> tuple[t.DrafterManifest, ...]:
    """The manifests of a `ListDraftersReply` or `DrafterUpdate`."""
    return tuple(_manifest_from_wire(wire) for wire in _parse(pb.ListDraftersReply, data).drafters)


def encode_drafter_query(tokenizer_sha256: str) -> bytes:
    """One `ListDraftersRequest` (or `WatchDraftersRequest`, which has the same shape) message."""
    return pb.ListDraftersRequest(tokenizer_sha256=tokenizer_sha256).SerializeToString()


def decode_drafter_query(data: bytes) -> str:
    """The tokenizer hash asked for; empty: all."""
    return str(_parse(pb.ListDraftersRequest, data).tokenizer_sha256)


def encode_fetch(sha256: str, offset: int) -> bytes:
    """One `FetchFileRequest` message."""
    return pb.FetchFileRequest(sha256=sha256, offset=offset).SerializeToString()


def decode_fetch(data: bytes) -> tuple[str, int]:
    """The hash of the wanted content and the bytes to skip."""
    wire = _parse(pb.FetchFileRequest, data)
    return wire.sha256, wire.offset


def encode_chunk(data: bytes) -> bytes:
    """One `FileChunk` message."""
    return pb.FileChunk(data=data).SerializeToString()


def decode_chunk(data: bytes) -> bytes:
    """The content of one `FileChunk`."""
    return bytes(_parse(pb.FileChunk, data).data)


_PLAIN_OF_REPORT = tuple(name for name in t.SessionReport.__dataclass_fields__ if name != "drafter_hits")
_HITS_FIELDS = tuple(t.DrafterHits.__dataclass_fields__)


def _report_to_wire(report: t.SessionReport) -> pb.SessionReport:
    hits = [pb.DrafterHits(**{name: getattr(each, name) for name in _HITS_FIELDS}) for each in report.drafter_hits]
    return pb.SessionReport(**{name: getattr(report, name) for name in _PLAIN_OF_REPORT}, drafter_hits=hits)


def _report_from_wire(wire: pb.SessionReport) -> t.SessionReport:
    _check_told(wire.drafter_hits, "report.drafter_hits")
    hits = tuple(t.DrafterHits(**{name: getattr(each, name) for name in _HITS_FIELDS}) for each in wire.drafter_hits)
    return t.SessionReport(**{name: getattr(wire, name) for name in _PLAIN_OF_REPORT}, drafter_hits=hits)


def encode_report(report: t.SessionReport) -> bytes:
    """One `SessionReport` message."""
    return _report_to_wire(report).SerializeToString()


def decode_report(data: bytes) -> t.SessionReport:
    """The report in `data`; raises `InvalidArgument`."""
    return _report_from_wire(_parse(pb.SessionReport, data))


def encode_status(status: t.ClusterStatus) -> bytes:
    """One `ClusterStatus` message."""
    names = t.VerifierStatus.__dataclass_fields__
    wire = pb.ClusterStatus(
        verifiers=[pb.VerifierStatus(**{name: getattr(v, name) for name in names}) for v in status.verifiers],
        drafters=[_manifest_to_wire(manifest) for manifest in status.drafters],
        leases_granted=status.leases_granted,
        recent=[_report_to_wire(report) for report in status.recent],
        edges=[
            pb.EdgeStatus(edge=e.edge, last=_report_to_wire(e.last), age_s=e.age_s, sessions=e.sessions)
            for e in status.edges
        ],
        acceptance=[
            pb.ClassAcceptance(
                model=a.model,
                prompt_class=a.prompt_class,
                link_class=a.link_class,
                of=_drafter_prior_to_wire(a.of),
            )
            for a in status.acceptance
        ],
    )
    if status.relay is not None:
        wire.relay.CopyFrom(pb.RelayStatus(**{f: getattr(status.relay, f) for f in t.RelayStatus.__dataclass_fields__}))
    return wire.SerializeToString()


def decode_status(data: bytes) -> t.ClusterStatus:
    """The status in `data`; raises `InvalidArgument`."""
    wire = _parse(pb.ClusterStatus, data)
    names = t.VerifierStatus.__dataclass_fields__
    return t.ClusterStatus(
        verifiers=tuple(t.VerifierStatus(**{name: getattr(v, name) for name in names}) for v in wire.verifiers),
        drafters=tuple(_manifest_from_wire(m) for m in wire.drafters),
        leases_granted=wire.leases_granted,
        recent=tuple(_report_from_wire(r) for r in wire.recent),
        relay=t.RelayStatus(**{f: getattr(wire.relay, f) for f in t.RelayStatus.__dataclass_fields__})
        if wire.HasField("relay")
        else None,
        edges=tuple(t.EdgeStatus(e.edge, _report_from_wire(e.last), e.age_s, e.sessions) for e in wire.edges),
        acceptance=tuple(
            t.ClassAcceptance(a.model, a.prompt_class, a.link_class, _drafter_prior_from_wire(a.of))
            for a in wire.acceptance
        ),
    )


def encode_drain(verifier: str) -> bytes:
    """One `DrainRequest` message."""
    return pb.DrainRequest(verifier=verifier).SerializeToString()


def decode_drain(data: bytes) -> str:
    """The name of the verifier to drain."""
    return str(_parse(pb.DrainRequest, data).verifier)


def encode_drained(sessions: int) -> bytes:
    """One `DrainReply` message."""
    return pb.DrainReply(sessions=sessions).SerializeToString()


def decode_drained(data: bytes) -> int:
    """How many sessions were asked to move."""
    return int(_parse(pb.DrainReply, data).sessions)


def encode_nothing(_: None) -> bytes:
    """A message without fields."""
    return b""


def decode_nothing(_: bytes) -> None:
    """A message without fields."""
