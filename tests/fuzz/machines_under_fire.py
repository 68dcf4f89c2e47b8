"""Both session machines, fed with damaged frames as verifiers and edges take them, and an honest session beside."""

from __future__ import annotations

import random
from collections import Counter

from frame_mutations import mutated, reordered
from recorded_streams import CONTINUES, HASH, PROMPT, TURN, VOCAB, oracle, recorded_stream, rules
from refusals import check_refusal

from outrider.proto import codec
from outrider.proto.errors import Internal, InvalidArgument, OutriderError
from outrider.proto.session import (
    Disconnected,
    Done,
    Drafted,
    DraftJob,
    EdgeSession,
    Emit,
    Reopen,
    Started,
    StreamReady,
)
from outrider.proto.session.verifier import Verified, VerifierSession
from outrider.proto.types import (
    Branches,
    Cancel,
    CommittedToken,
    Continue,
    Draft,
    DraftToken,
    EdgeFrame,
    Open,
    Report,
    token_ids,
)

STREAMS = 24  # recorded ones
_HURT = (0.02, 0.1, 0.4)  # shares of the frames of a stream that are damaged
_MAX_MESSAGE_TOKENS = 600


def step(session: VerifierSession) -> None:
    """Let the target verify the drafts of a session, as a step of the engine does."""
    block = session.block()
    said = tuple(session.transcript)
    drafts = token_ids(block)
    by_target = tuple(CommittedToken(oracle(said + drafts[:j]), -0.5) for j in range(len(block) + 1))
    commit = session.on_verified(Verified(block, by_target), 1.0)
    codec.decode_cloud_frame(codec.encode_cloud_frame(commit))


class VerifierUnderFire:
    """One hostile stream to a verifier: frames in, and steps between them.

    Attributes:
        refusal: why the stream ended; None: it has not.
    """

    def __init__(self, rng: random.Random) -> None:
        self.refusal: OutriderError | None = None
        self._rng = rng
        self._session: VerifierSession | None = None
        self._begins = 0  # of the present turn's text

    def receive(self, data: bytes) -> None:
        """Take one message; an error of the tree ends the stream."""
        try:
            self._take(codec.decode_edge_frame(data, _MAX_MESSAGE_TOKENS, rules().max_credit))
        except OutriderError as error:
            check_refusal(error)
            self.refusal = error
        session = self._session
        while session is not None and session.finish is None and self._rng.random() < 0.4:
            assert session.ready_at(0.01, 0.001) is not None
            step(session)

    def _take(self, frame: EdgeFrame) -> None:
        session = self._session
        if session is None:
            if not isinstance(frame, Open):
                raise InvalidArgument("must be the first frame of a stream", field="frame.open")
            session = self._session = VerifierSession(frame, rules(), 0.0)
            self._begins = len(session.transcript)
            codec.encode_cloud_frame(session.opened())
            return
        if session.finish is not None and not isinstance(frame, Continue | Report):
            return
        match frame:
            case Open():
                raise InvalidArgument("comes twice in one stream", field="frame.open")
            case Continue():
                self.check()
                self._session = session.continued(frame, 1.0)
                self._begins = len(self._session.transcript)
            case Draft():
                session.on_draft(frame, 1.0)
            case Branches():
                session.on_branches(frame)
            case Report():
                session.on_report(frame)
            case Cancel():
                session.on_cancel()

    def finish_turn(self) -> None:
        """Let the target decode the text to its end."""
        while self._session is not None and self._session.finish is None:
            step(self._session)

    def check(self) -> None:
        """Fail unless every token of the text is the target's own."""
        if self._session is None:
            return
        said = tuple(self._session.transcript)
        for position in range(self._begins, len(said)):
            assert said[position] == oracle(said[:position]), "the text of a hostile stream is not the target's"


class HonestSession:
    """A session beside the hostile ones, on the same rules, that drafts well and must get its own text."""

    def __init__(self) -> None:
        self.texts = 0
        self._number = 0
        self._begin()

    def _begin(self) -> None:
        self._number += 1
        prompt = (*PROMPT, self._number % VOCAB)
        self._session = VerifierSession(Open("m", HASH, prompt, TURN, "honest"), rules(), 0.0)
        self._wanted: tuple[int, ...] = prompt
        for _ in range(TURN.max_tokens):
            self._wanted += (oracle(self._wanted),)

    def go_on(self) -> None:
        """Send drafts, take a step, and at the text's end compare it."""
        session = self._session
        start = len(session.transcript)
        ahead = self._wanted[start : start + 3]
        if ahead:
            drafts = tuple(map(DraftToken, (*ahead[:-1], 1 + ahead[-1] % (VOCAB - 1))))
            session.on_draft(Draft(max(0, session.chain) + (start > len(PROMPT) + 1), start, drafts), 1.0)
        step(session)
        if session.finish is not None:
            assert tuple(session.transcript) == self._wanted, "an honest session has lost its text"
            self.texts += 1
            self._begin()


class EdgeUnderFire:
    """An edge's machine, and what a damaged verifier sends it."""

    def __init__(self, rng: random.Random) -> None:
        self.ended = False
        self._rng = rng
        self._edge = EdgeSession(Open("m", HASH, PROMPT, TURN, "edge", keep_s=5.0), send_q=True)
        self._emitted: list[int] = list(PROMPT)
        self._now = 0.0
        self._handle(Started())
        self._handle(StreamReady(b""))

    def receive(self, data: bytes) -> None:
        """Take one message from the verifier."""
        self._now += 0.01
        try:
            frame = codec.decode_cloud_frame(data)
        except InvalidArgument as error:
            self._handle(Disconnected(error))
            return
        self._handle(frame)

    def _handle(self, event: object) -> None:
        for instruction in self._edge.handle(event, self._now):  # type: ignore[arg-type]
            match instruction:
                case Emit(tokens=tokens):
                    assert not self.ended, "speaks after its end"
                    self._emitted += token_ids(tokens)
                    assert self._emitted == self._edge.transcript, "what the user got is not the transcript"
                case Done(error=error):
                    assert error is None or isinstance(error, OutriderError)
                    assert not isinstance(error, Internal)
                    self.ended = True
                case Reopen(after_s, _):
                    assert 0 <= after_s < float("inf")
                    if not self.ended and self._rng.random() < 0.5:
                        self._handle(StreamReady(b""))
                case DraftJob():
                    tokens = tuple(DraftToken(self._rng.randrange(VOCAB), 0.5) for _ in range(instruction.count))
                    self._handle(Drafted(instruction, tokens, 0.001))


class Fire:
    """Streams of damaged frames, without end; `frames` counts them, `outcomes` what became of the streams."""

    def __init__(self, seed: int) -> None:
        self.frames = 0
        self.outcomes: Counter[str] = Counter()
        self.honest = HonestSession()
        self._rng = random.Random(seed)
        plain = {"drafting": True, "logprobs": True, "top_logprobs": 3}
        self._recorded = [recorded_stream(seed, **(plain if seed % 3 else {})) for seed in range(STREAMS)]

    def one_stream(self) -> None:
        """Send one damaged stream to a verifier or to an edge."""
        sent, received = self._rng.choice(self._recorded)
        if self._rng.random() < 0.75:
            verifier = VerifierUnderFire(self._rng)
            for data in self._damaged(sent):
                if data[:1] == CONTINUES and self._rng.random() < 0.9:
                    verifier.finish_turn()
                verifier.receive(data)
                self.frames += 1
                if self._rng.random() < 0.1:
                    self.honest.go_on()
                if verifier.refusal is not None:
                    break
            verifier.check()
            self.outcomes["went on" if verifier.refusal is None else type(verifier.refusal).__name__] += 1
        else:
            edge = EdgeUnderFire(self._rng)
            for data in self._damaged(received):
                edge.receive(data)
                self.frames += 1
            self.outcomes["edge ended" if edge.ended else "edge went on"] += 1

    def _damaged(self, frames: list[bytes]) -> list[bytes]:
        first, *rest = frames
        if self._rng.random() < 0.5:
            rest = reordered(self._rng, rest)
        hurt = self._rng.choice(_HURT)
        opening = first if self._rng.random() < 0.7 else mutated(self._rng, first)
        return [opening, *(mutated(self._rng, frame) if self._rng.random() < hurt else frame for frame in rest)]
