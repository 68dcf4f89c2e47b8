"""Conversion between domain types and protobuf bytes, all of it but that of the cluster's status (`status`).

Bytes from a stranger become a checked domain object or raise `InvalidArgument` that names the field. Tables copy
dataclasses to messages field by field: those of the same name as they are, lists as tuples; a table names the makers of
all others. `Draft` and `Commit` are copied by hand, since every token is in them.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from outrider.proto import types as t
from outrider.proto.errors import InvalidArgument, PromptTooLong, ResourceExhausted
from outrider.proto.policy.likely_branches import MAX_BRANCHES
from outrider.proto.v1 import decoding_pb2 as pb

CONTROL_SERVICE = "outrider.proto.v1.Control"
DECODE_METHOD = "/outrider.proto.v1.Decoding/Decode"
DECODING_SERVICE = "outrider.proto.v1.Decoding"
SMALL_FRAME_BYTES = 64 * 1024
_MAX_BYTES = {
    **dict.fromkeys(("draft", "branches"), SMALL_FRAME_BYTES),
    **dict.fromkeys(("report", "cancel", "ping"), 4096),
}
_PADDING_TAG = b"\x4a"  # field 9 of EdgeFrame, which has a length: here always five bytes, so that any size can be had
_PADDING_BYTES = 6
_CHANCES = 255  # parts in which a branch's chance travels

T = TypeVar("T")
M = TypeVar("M", bound=Message)


def parse(kind: Callable[[], M], data: bytes) -> M:
    """Return the message in `data`; raises `InvalidArgument` about `frame` where it is none."""
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise InvalidArgument(f"is not a {message.DESCRIPTOR.full_name} message", field="frame") from error
    return message


def to_microseconds(seconds: float) -> int:
    """Return whole microseconds, clipped to a uint32."""
    return min(0xFFFFFFFF, max(0, round(seconds * 1e6)))


def to_enum(kind: type[T], number: int, field: str) -> T:
    """Return the member of `kind` with this number; raises `InvalidArgument` about `field` where there is none."""
    try:
        return kind(number)  # type: ignore[call-arg]  # an Enum
    except ValueError as error:
        raise InvalidArgument(f"{number} is not a {kind.__name__}", field=field) from error


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a dataclass on the wire: its value as fields of the message, and the value that a message holds."""

    encode: Callable[[Any], dict[str, Any]]
    decode: Callable[[Any], Any]


Maker = Callable[[str], Field]  # makes a field from its name


def plain(name: str) -> Field:
    """Copy a number, a string or bytes."""
    return Field(lambda value: {name: value}, lambda wire: getattr(wire, name))


def optional_number(name: str) -> Field:
    """Copy a number, or None where it is not set."""
    return Field(
        lambda value: {} if value is None else {name: value},
        lambda wire: getattr(wire, name) if wire.HasField(name) else None,
    )


def plain_list(name: str) -> Field:
    """Copy a list of numbers or strings as a tuple."""
    return Field(lambda values: {name: values}, lambda wire: tuple(getattr(wire, name)))


def enumeration(kind: type[Enum], field: str) -> Maker:
    """Copy an enum by its number; errors name `field`."""
    return lambda name: Field(
        lambda member: {name: member.value}, lambda wire: to_enum(kind, getattr(wire, name), field)
    )


def microseconds(name: str) -> Field:
    """Copy seconds as whole microseconds."""
    wire_name = name.removesuffix("_s") + "_us"
    return Field(lambda seconds: {wire_name: to_microseconds(seconds)}, lambda wire: getattr(wire, wire_name) / 1e6)


class Table(Generic[T]):
    """A dataclass and its message."""

    def __init__(
        self,
        kind: type[T],
        wire: Callable[..., Any],
        check: Callable[[Any], None] | None = None,
        /,
        **makers: Maker,
    ) -> None:
        """Pair a dataclass with the message class `wire`; `makers` make the fields that are not copied as they are.

        `check` raises InvalidArgument for messages that are refused by what the dataclass has no field for.
        """
        self._kind = kind
        self._wire = wire
        self._check = check
        lists = {entry.name for entry in wire.DESCRIPTOR.fields if entry.is_repeated}  # type: ignore[attr-defined]
        self._fields = {
            name: makers.pop(name, plain_list if name in lists else plain)(name)
            for name in (entry.name for entry in fields(kind))  # type: ignore[arg-type]  # a dataclass
        }
        if makers:
            raise TypeError(f"{kind.__name__} has no {', '.join(makers)}")

    def to_wire(self, value: T) -> Any:
        wire: dict[str, Any] = {}
        for name, field in self._fields.items():
            wire.update(field.encode(getattr(value, name)))
        return self._wire(**wire)

    def from_wire(self, wire: Any) -> T:
        """Return the checked value that the message holds."""
        if self._check is not None:
            self._check(wire)
        return self._kind(**{name: field.decode(wire) for name, field in self._fields.items()})

    def encode(self, value: T) -> bytes:
        encoded: bytes = self.to_wire(value).SerializeToString()
        return encoded

    def decode(self, data: bytes) -> T:
        """Return the value in `data`; raises `InvalidArgument` with the field named."""
        return self.from_wire(parse(self._wire, data))


def one(table: Table[Any], missing: str = "") -> Maker:
    """Copy a message; one that is not set counts as empty, or is an error about `missing` where that is given."""

    def maker(name: str) -> Field:
        def decode(wire: Any) -> Any:
            if missing and not wire.HasField(name):
                raise InvalidArgument("is missing", field=missing)
            return table.from_wire(getattr(wire, name))

        return Field(lambda value: {name: table.to_wire(value)}, decode)

    return maker


def optional(table: Table[Any]) -> Maker:
    """Copy a message, or None where it is not set."""
    return lambda name: Field(
        lambda value: {} if value is None else {name: table.to_wire(value)},
        lambda wire: table.from_wire(getattr(wire, name)) if wire.HasField(name) else None,
    )


def many(table: Table[Any], max_entries: int | None = None, field: str = "") -> Maker:
    """Copy messages; more than `max_entries` are an error about `field`."""

    def maker(name: str) -> Field:
        def decode(wire: Any) -> Any:
            entries = getattr(wire, name)
            # Checked before a tuple is built, so that a stranger's message cannot hold a server up.
            if max_entries is not None and len(entries) > max_entries:
                raise InvalidArgument(f"holds {len(entries)} entries; {max_entries} are the most", field=field)
            return tuple(map(table.from_wire, entries))

        return Field(lambda values: {name: list(map(table.to_wire, values))}, decode)

    return maker


class Single(Generic[T]):
    """A message whose only field stands for the whole."""

    def __init__(self, wire: Callable[..., Any], name: str, maker: Maker = plain) -> None:
        self._wire = wire
        self._field = maker(name)

    def encode(self, value: T) -> bytes:
        encoded: bytes = self._wire(**self._field.encode(value)).SerializeToString()
        return encoded

    def decode(self, data: bytes) -> T:
        value: T = self._field.decode(parse(self._wire, data))
        return value


# --- frames of a decoding stream ---


def _logit_bias(_: str) -> Field:
    """Copy (token, bias) pairs as two packed lists."""

    def encode(pairs: tuple[tuple[int, float], ...]) -> dict[str, Any]:
        return {"bias_tokens": [token for token, _ in pairs], "bias_values": [bias for _, bias in pairs]}

    def decode(wire: pb.Sampling) -> tuple[tuple[int, float], ...]:
        if len(wire.bias_tokens) != len(wire.bias_values):
            raise InvalidArgument("must hold one value for each of bias_tokens", field="sampling.bias_values")
        return tuple(zip(wire.bias_tokens, wire.bias_values, strict=True))

    return Field(encode, decode)


def _refuse_other_noise(field: str) -> Callable[[pb.Sampling | pb.Opened], None]:
    """Check that a peer of an older release draws the text with the noise that there is; errors name `field`."""

    def check(wire: pb.Sampling | pb.Opened) -> None:
        if wire.noise > 1:
            raise InvalidArgument(
                f"is {wire.noise}, and this release has 1 alone; update the other side, or start it without --noise",
                field=field,
            )

    return check


GRAMMAR = Table(t.Grammar, pb.Grammar, kind=enumeration(t.GrammarKind, "sampling.grammar"))
SAMPLING = Table(
    t.Sampling,
    pb.Sampling,
    _refuse_other_noise("sampling.noise"),
    logit_bias=_logit_bias,
    grammar=optional(GRAMMAR),
)
_PRECISION = enumeration(t.SteeringPrecision, "steering.precision")
STEERING = Table(t.Steering, pb.Steering, precision=_PRECISION)
STEERING_REQUEST = Table(t.SteeringRequest, pb.SteeringRequest, precision=_PRECISION)
_SERVICE = Table(t.ServiceGoal, pb.ServiceGoal)
OPEN = Table(
    t.Open,
    pb.Open,
    sampling=one(SAMPLING, missing="open.sampling"),
    patience=optional(Table(t.Patience, pb.Patience)),
    steering=optional(STEERING_REQUEST),
    drafts_here=optional_number,
    learning=optional(Table(t.Learning, pb.Learning)),
    quiet=optional(Table(t.QuietWire, pb.QuietWire)),
    prompt_logprobs=optional_number,
    service=optional(_SERVICE),
)
CONTINUE = Table(t.Continue, pb.Continue, sampling=optional(SAMPLING))
_FRAME_REPORT = Table(
    t.Report, pb.Report, drafting_s=microseconds, round_trip_s=microseconds, steering=optional(STEERING_REQUEST)
)
CANCEL = Table(t.Cancel, pb.Cancel)
OPENED = Table(
    t.Opened,
    pb.Opened,
    _refuse_other_noise("opened.noise"),
    goal=enumeration(t.Goal, "opened.goal"),
    guarantee=enumeration(t.Guarantee, "opened.guarantee"),
)
GOAWAY = Table(t.Goaway, pb.Goaway)
PING = Table(t.Ping, pb.Ping)
PONG = Table(t.Pong, pb.Pong)


def _draft_to_wire(draft: t.Draft) -> pb.Draft:
    q = [token.confidence for token in draft.tokens if not math.isnan(token.confidence)]
    return pb.Draft(
        chain=draft.chain,
        start=draft.start,
        tokens=[token.id for token in draft.tokens],
        q=struct.pack(f"<{len(q)}e", *q),
        drafter=draft.drafter,
        drafter_version=draft.drafter_version,
        complete=draft.complete,
        branches=_runs_to_wire(draft.branches) if draft.branches else None,
    )


def _draft_from_wire(wire: pb.Draft) -> t.Draft:
    return t.Draft(
        chain=wire.chain,
        start=wire.start,
        tokens=_drafted_from_wire(wire),
        drafter=wire.drafter,
        drafter_version=wire.drafter_version,
        complete=wire.complete,
        branches=_runs_from_wire(wire.branches, "draft.branches.") if wire.HasField("branches") else (),
    )


def _branches_to_wire(frame: t.Branches) -> pb.Branches:
    wire = _runs_to_wire(frame.branches)
    wire.chain = frame.chain
    return wire


def _branches_from_wire(wire: pb.Branches) -> t.Branches:
    return t.Branches(wire.chain, _runs_from_wire(wire, "branches."))


def _runs_to_wire(branches: tuple[t.Branch, ...]) -> pb.Branches:
    known = not any(math.isnan(branch.chance) for branch in branches)
    return pb.Branches(
        starts=[branch.start for branch in branches],
        lengths=[len(branch.tokens) for branch in branches],
        tokens=[token for branch in branches for token in branch.tokens],
        chances=bytes(round(_CHANCES * branch.chance) for branch in branches) if known else b"",
    )


def _runs_from_wire(wire: pb.Branches, prefix: str) -> tuple[t.Branch, ...]:
    if len(wire.lengths) != len(wire.starts) or sum(wire.lengths) != len(wire.tokens):
        raise InvalidArgument("must hold one for each start, and their sum of tokens", field=f"{prefix}lengths")
    if len(wire.chances) not in (0, len(wire.starts)):
        raise InvalidArgument("must hold one for each start, or none", field=f"{prefix}chances")
    tokens = iter(wire.tokens)
    chances = [share / _CHANCES for share in wire.chances] or [math.nan] * len(wire.starts)
    return tuple(
        t.Branch(start, tuple(itertools.islice(tokens, length)), chance)
        for start, length, chance in zip(wire.starts, wire.lengths, chances, strict=True)
    )


def _drafted_from_wire(wire: pb.Draft) -> tuple[t.DraftToken, ...]:
    if not wire.q:
        return tuple(map(t.DraftToken, wire.tokens))
    if len(wire.q) != 2 * len(wire.tokens):
        raise InvalidArgument("must be 2 bytes a token, or none", field="draft.q")
    confidence = struct.unpack(f"<{len(wire.tokens)}e", wire.q)
    if math.isnan(confidence[0]):  # for all tokens it means "unknown" in a Draft, which refuses it for some of them
        raise InvalidArgument("must be probabilities", field="draft.q")
    return tuple(map(t.DraftToken, wire.tokens, confidence))


def _commit_to_wire(commit: t.Commit) -> pb.Commit:
    ids, logp, facts = zip(*commit.tokens, strict=True) if commit.tokens else ((), (), ())
    wire = pb.Commit(
        start=commit.start,
        tokens=ids,
        accepted=commit.accepted,
        logp=() if None in logp else logp,
        reward=commit.reward,
        credit=commit.credit,
        timing=pb.Timing(
            echo=commit.timing.echo,
            hold_us=to_microseconds(commit.timing.hold_s),
            queue_us=to_microseconds(commit.timing.queue_s),
            verify_us=to_microseconds(commit.timing.verify_s),
            drafting_us=to_microseconds(commit.timing.drafting_s),
        ),
        finish=pb.FinishReason.Name(commit.finish.value) if commit.finish else None,
        chain=commit.chain,
        verified=commit.verified,
        verified_beside=commit.verified_beside,
        turn=commit.turn,
        cached_tokens=commit.cached_tokens,
        verified_here=commit.verified_here,
        covered=commit.covered,
        epoch=commit.epoch,
        **_facts_to_wire(() if None in facts else facts),
    )
    if commit.steering is not None:
        wire.steering.CopyFrom(STEERING.to_wire(commit.steering))
    return wire


def _commit_from_wire(wire: pb.Commit) -> t.Commit:
    return t.Commit(
        start=wire.start,
        tokens=_committed_from_wire(wire),
        accepted=wire.accepted,
        reward=wire.reward if wire.HasField("reward") else None,
        steering=STEERING.from_wire(wire.steering) if wire.HasField("steering") else None,
        credit=wire.credit,
        timing=t.Timing(
            wire.timing.echo,
            wire.timing.hold_us / 1e6,
            wire.timing.queue_us / 1e6,
            wire.timing.verify_us / 1e6,
            wire.timing.drafting_us / 1e6,
        ),
        finish=to_enum(t.FinishReason, wire.finish, "commit.finish") if wire.finish else None,
        chain=wire.chain,
        verified=wire.verified,
        verified_beside=wire.verified_beside,
        turn=wire.turn,
        cached_tokens=wire.cached_tokens,
        verified_here=wire.verified_here,
        covered=wire.covered,
        epoch=wire.epoch,
    )


def _committed_from_wire(wire: pb.Commit) -> tuple[t.CommittedToken, ...]:
    if len(wire.logp) not in (0, len(wire.tokens)):
        raise InvalidArgument("must hold one for each token, or none", field="commit.logp")
    if len(wire.logprobs) not in (0, len(wire.tokens)):
        raise InvalidArgument("must hold one for each token, or none", field="commit.logprobs")
    facts = _facts_from_wire(wire, "commit", "commit.top_logprobs")
    unasked = itertools.repeat(None)
    return tuple(map(t.CommittedToken, wire.tokens, wire.logp or unasked, facts or unasked))


def _facts_to_wire(facts: Sequence[t.TokenFacts]) -> dict[str, Any]:
    """Return the lists of facts, which a Commit and the log probabilities of a prompt have alike."""
    logprobs, ranks, tops, entropies = zip(*facts, strict=True) if facts else ((), (), (), ())
    return {
        "logprobs": logprobs,
        "ranks": ranks if any(ranks) else (),
        "top_tokens": [likely for entries in tops for likely, _ in entries],
        "top_logp": [of_likely for entries in tops for _, of_likely in entries],
        "entropies": () if None in entropies else entropies,
    }


def _facts_from_wire(wire: pb.Commit | pb.PromptLogprobs, where: str, tops: str) -> list[t.TokenFacts]:
    """Return the facts of each token that has `logprobs`; `where` and `tops` name frame and field in errors."""
    count = len(wire.logprobs)
    if len(wire.ranks) not in (0, count):
        raise InvalidArgument("must hold one for each of logprobs", field=f"{where}.ranks")
    if len(wire.entropies) not in (0, count):
        raise InvalidArgument("must hold one for each of logprobs", field=f"{where}.entropies")
    each, odd = divmod(len(wire.top_tokens), max(1, count))
    if odd or len(wire.top_logp) != len(wire.top_tokens) or (wire.top_tokens and not count):
        raise InvalidArgument("must hold equally many tokens and numbers for each of logprobs", field=tops)
    pairs = list(zip(wire.top_tokens, wire.top_logp, strict=True))
    top = [tuple(pairs[first : first + each]) for first in range(0, count * each, each or 1)] or itertools.repeat(())
    ranks, entropies = wire.ranks or itertools.repeat(0), wire.entropies or itertools.repeat(None)
    return list(map(t.TokenFacts, wire.logprobs, ranks, top, entropies))


def _prompt_logprobs_to_wire(frame: t.PromptLogprobs) -> pb.PromptLogprobs:
    return pb.PromptLogprobs(start=frame.start, epoch=frame.epoch, **_facts_to_wire(frame.tokens))


def _prompt_logprobs_from_wire(wire: pb.PromptLogprobs) -> t.PromptLogprobs:
    facts = _facts_from_wire(wire, "prompt_logprobs", "prompt_logprobs.top_tokens")
    return t.PromptLogprobs(wire.start, tuple(facts), wire.epoch)


_EDGE_BODIES: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    t.Open: ("open", OPEN.to_wire, OPEN.from_wire),
    t.Continue: ("continuation", CONTINUE.to_wire, CONTINUE.from_wire),
    t.Draft: ("draft", _draft_to_wire, _draft_from_wire),
    t.Report: ("report", _FRAME_REPORT.to_wire, _FRAME_REPORT.from_wire),
    t.Branches: ("branches", _branches_to_wire, _branches_from_wire),
    t.Cancel: ("cancel", CANCEL.to_wire, CANCEL.from_wire),
    t.Ping: ("ping", PING.to_wire, PING.from_wire),
}
_CLOUD_BODIES: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    t.Opened: ("opened", OPENED.to_wire, OPENED.from_wire),
    t.PromptLogprobs: ("prompt_logprobs", _prompt_logprobs_to_wire, _prompt_logprobs_from_wire),
    t.Commit: ("commit", _commit_to_wire, _commit_from_wire),
    t.Goaway: ("goaway", GOAWAY.to_wire, GOAWAY.from_wire),
    t.Pong: ("pong", PONG.to_wire, PONG.from_wire),
}
_FROM_EDGE = {name: from_wire for name, _, from_wire in _EDGE_BODIES.values()}
_FROM_CLOUD = {name: from_wire for name, _, from_wire in _CLOUD_BODIES.values()}


def encode_edge_frame(frame: t.EdgeFrame) -> bytes:
    """Return one `EdgeFrame` message."""
    name, to_wire, _ = _EDGE_BODIES[type(frame)]
    result: bytes = pb.EdgeFrame(**{name: to_wire(frame)}).SerializeToString()
    return result


def padded_edge_frame(data: bytes, size: int) -> bytes:
    """Return the `EdgeFrame` message in `data`, 6 bytes shorter than `size` or more, with zeros that make it `size`."""
    zeros = size - len(data) - _PADDING_BYTES
    length = bytes([zeros >> shift & 0x7F | 0x80 for shift in (0, 7, 14, 21)]) + bytes([zeros >> 28])
    return data + _PADDING_TAG + length + bytes(zeros)


def decode_edge_frame(data: bytes, max_tokens: int = t.MAX_TOKEN_ID, max_credit: int = t.MAX_TOKEN_ID) -> t.EdgeFrame:
    """Return the frame in `data`.

    Its lengths are checked before a list is built, so that a stranger's message cannot hold a server up.

    Args:
        data: one message; only an Open and a Continue may have more than `SMALL_FRAME_BYTES`.
        max_tokens: bound of any list in these two.
        max_credit: most drafts of a session; no chain and no branch is longer.

    Raises:
        InvalidArgument: with the field named.
        ResourceExhausted: it has more drafts or branches than any credit allows.
    """
    name, body = _body_of(parse(pb.EdgeFrame, data), _FROM_EDGE)
    most = _MAX_BYTES.get(name)
    if most is not None and len(data) > most:
        raise InvalidArgument(f"has {len(data)} bytes; such a frame has {most} at most", field=f"frame.{name}")
    _check_lengths(name, body, max_tokens)
    if name in ("draft", "branches"):
        _check_drafts(name, body, max_credit)
    result: t.EdgeFrame = _FROM_EDGE[name](body)
    return result


def encode_cloud_frame(frame: t.CloudFrame) -> bytes:
    """Return one `CloudFrame` message."""
    name, to_wire, _ = _CLOUD_BODIES[type(frame)]
    result: bytes = pb.CloudFrame(**{name: to_wire(frame)}).SerializeToString()
    return result


def decode_cloud_frame(data: bytes) -> t.CloudFrame:
    """Return the frame in `data`; raises `InvalidArgument` with the field named."""
    name, body = _body_of(parse(pb.CloudFrame, data), _FROM_CLOUD)
    result: t.CloudFrame = _FROM_CLOUD[name](body)
    return result


def _body_of(wire: Any, bodies: Iterable[str]) -> tuple[str, Any]:
    name = wire.WhichOneof("body")
    if name is None:
        raise InvalidArgument(f"holds none of {', '.join(bodies)}", field="frame.body")
    if name == "cell":
        raise InvalidArgument("comes in a cell, or in a stream whose Open has no `quiet`", field="frame.cell")
    return name, getattr(wire, name)


def encode_edge_cell(data: bytes) -> bytes:
    """Return one `EdgeFrame` message with a cell of a quiet stream."""
    result: bytes = pb.EdgeFrame(cell=pb.Cell(data=data)).SerializeToString()
    return result


def encode_cloud_cell(data: bytes) -> bytes:
    """Return one `CloudFrame` message with a cell of a quiet stream."""
    result: bytes = pb.CloudFrame(cell=pb.Cell(data=data)).SerializeToString()
    return result


def decode_edge_cell(data: bytes) -> bytes:
    """Return the cell in an `EdgeFrame` message; raises `InvalidArgument` where it holds another frame."""
    return _cell_of(parse(pb.EdgeFrame, data))


def decode_cloud_cell(data: bytes) -> bytes:
    """Return the cell in a `CloudFrame` message; raises `InvalidArgument` where it holds another frame."""
    return _cell_of(parse(pb.CloudFrame, data))


def _cell_of(wire: Any) -> bytes:
    if not wire.HasField("cell"):
        raise InvalidArgument("is missing; nothing else follows the Open of a quiet stream", field="frame.cell")
    data: bytes = wire.cell.data
    return data


_LISTS = {
    "open": ("prompt", "committed"),
    "continuation": ("prompt",),
    "sampling": ("bias_tokens", "bias_values", "allowed_tokens", "stop_tokens"),
}


def _check_lengths(name: str, message: Any, max_tokens: int) -> None:
    for field in _LISTS.get(name, ()):
        size = len(getattr(message, field))
        if size > 2 * max_tokens:  # prompt and committed are checked more closely later
            error = PromptTooLong if field == "prompt" else InvalidArgument
            raise error(f"holds {size} entries; {max_tokens} is the most that can make sense", field=f"{name}.{field}")
    if name in ("open", "continuation"):
        _check_lengths("sampling", message.sampling, max_tokens)


def _check_drafts(name: str, message: Any, max_credit: int) -> None:
    if name == "draft":
        _check_count(len(message.tokens), max_credit, "draft.tokens")
        _check_count(len(message.q), 2 * max_credit, "draft.q")  # two bytes each
        if not message.HasField("branches"):
            return
        message, name = message.branches, "draft.branches"
    for field in ("starts", "lengths", "chances"):
        _check_count(len(getattr(message, field)), MAX_BRANCHES, f"{name}.{field}")
    if max(message.lengths, default=0) > max_credit:
        raise ResourceExhausted(f"exceed {max_credit}; respect the credit", field=f"{name}.lengths")
    _check_count(len(message.tokens), MAX_BRANCHES * max_credit, f"{name}.tokens")


def _check_count(size: int, most: int, field: str) -> None:
    if size > most:
        raise ResourceExhausted(f"are {size}; send {most} at most, and respect the credit", field=field)


# --- the control plane ---

FILE = Table(t.RemoteFile, pb.RemoteFile)
MANIFEST = Table(t.DrafterManifest, pb.DrafterManifest, files=many(FILE))
DRAFTER_PRIOR = Table(t.DrafterPrior, pb.DrafterPrior)
PRIOR = Table(
    t.DraftingPrior, pb.DraftingPrior, drafters=many(DRAFTER_PRIOR, t.MAX_REPORTED_DRAFTERS, "prior.drafters")
)
LEASE_REQUEST = Table(t.LeaseRequest, pb.LeaseRequest, service=optional(_SERVICE))
LEASE = Table(
    t.Lease,
    pb.Lease,
    tokenizer=optional(FILE),
    chat_template=optional(FILE),
    drafters=many(MANIFEST),
    prior=one(PRIOR),
    service=optional(_SERVICE),
)
REPORT = Table(
    t.SessionReport,
    pb.SessionReport,
    drafter_hits=many(Table(t.DrafterHits, pb.DrafterHits), t.MAX_REPORTED_DRAFTERS, "report.drafter_hits"),
)
# They serve DrafterUpdate and WatchDraftersRequest too, which have the same fields.
DRAFTERS: Single[tuple[t.DrafterManifest, ...]] = Single(pb.ListDraftersReply, "drafters", many(MANIFEST))
DRAFTER_QUERY: Single[str] = Single(pb.ListDraftersRequest, "tokenizer_sha256")
CHUNK: Single[bytes] = Single(pb.FileChunk, "data")
DRAIN: Single[str] = Single(pb.DrainRequest, "verifier")
DRAINED: Single[int] = Single(pb.DrainReply, "sessions")

encode_lease_request, decode_lease_request = LEASE_REQUEST.encode, LEASE_REQUEST.decode
encode_lease, decode_lease = LEASE.encode, LEASE.decode
encode_report, decode_report = REPORT.encode, REPORT.decode
encode_drafters, decode_drafters = DRAFTERS.encode, DRAFTERS.decode
encode_drafter_query, decode_drafter_query = DRAFTER_QUERY.encode, DRAFTER_QUERY.decode
encode_chunk, decode_chunk = CHUNK.encode, CHUNK.decode
encode_drain, decode_drain = DRAIN.encode, DRAIN.decode
encode_drained, decode_drained = DRAINED.encode, DRAINED.decode


def encode_fetch(sha256: str, offset: int) -> bytes:
    """Return one `FetchFileRequest` message."""
    result: bytes = pb.FetchFileRequest(sha256=sha256, offset=offset).SerializeToString()
    return result


def decode_fetch(data: bytes) -> tuple[str, int]:
    """Return the hash of the requested content and the bytes to skip."""
    wire = parse(pb.FetchFileRequest, data)
    return wire.sha256, wire.offset


def encode_nothing(_: None) -> bytes:
    """Return a message without fields."""
    return b""


def decode_nothing(_: bytes) -> None:
    """Read a message without fields."""
