"""Texts that a target writes alone, many at once, by the rules of a session and the shared noise.

Every edge gets these texts from a verifier of this target, whatever it drafts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from outrider.cloud.target.backend import Handle, StepRow
from outrider.cloud.target.projection import Projection
from outrider.cloud.target.steering_vectors import fold, tapped_layers
from outrider.cloud.target.target import Target
from outrider.cloud.target.transformers_backend import TransformersBackend
from outrider.cloud.target.verification import VerificationInput
from outrider.proto.errors import ConfigError, OutriderError
from outrider.proto.session.verifier import Verified, VerifierRules, VerifierSession
from outrider.proto.types import Open, Sampling

AT_ONCE = 64  # texts
MAX_PROMPT_ROWS = 1024  # rows of new prompts in a step
LOGITS_BYTES = 1 << 30  # for the logits of texts in progress, where they are kept


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A text to write after the token ids `prompt` [p]; the seed of `sampling` is that of the shared noise."""

    prompt: tuple[int, ...]
    sampling: Sampling
    id: str = ""
    domain: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class WrittenText:
    """A prompt and the target's text after it.

    Attributes:
        transcript: [p + n] prompt and text.
        vectors: [n, rank] float32 steering vectors from the last position of the prompt on, by projection.
        logits: [n, vocab] float32, the target's for each token.
    """

    request: TextRequest
    transcript: tuple[int, ...]
    vectors: Mapping[str, np.ndarray] = field(default_factory=dict)
    logits: torch.Tensor | None = None  # None: no longer kept

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.transcript[self.prompt_length :]


@dataclass(slots=True, eq=False)
class _Sheet:
    """A text in progress: the verifier's half of a session whose edge sends no drafts."""

    request: TextRequest
    session: VerifierSession
    vectors: dict[str, list[np.ndarray]] = field(default_factory=dict)
    logits: list[torch.Tensor] = field(default_factory=list)
    handle: Handle = field(init=False)  # from when it is admitted

    @property
    def room(self) -> int:
        """Positions that it may come to need."""
        return self.session.prompt_length + self.session.sampling.max_tokens

    def text(self) -> WrittenText:
        vectors = {name: np.stack(rows) for name, rows in self.vectors.items()}
        return WrittenText(self.request, tuple(self.session.transcript), vectors, torch.stack(self.logits))

    def row(self, *, tapped: bool) -> StepRow:
        session = self.session
        verification = VerificationInput(
            session.sampling, session.transcript, session.prompt_length, (), eos_tokens=session.eos_tokens
        )
        return StepRow(self.handle, tuple(session.transcript[self.handle.length :]), verification, tapped)


class TextWriter:
    """A decoder of prompts with the target alone, many at once.

    The target is tapped from now on for the steering vectors of `projections`, by id.
    """

    def __init__(self, target: Target, projections: Mapping[str, Projection] = {}, *, at_once: int = AT_ONCE) -> None:
        self._backend = TransformersBackend(target)
        self._at_once = at_once
        self._tapped = tapped_layers(projections)
        if projections:
            self._backend.tap(self._tapped)
        self._projections = fold(projections, target.device)
        self._rules = VerifierRules(
            name="writer",
            model="target",
            tokenizer_sha256=target.tokenizer_sha256,
            vocab_size=target.vocab_size,
            context_length=target.context_length,
            eos_tokens=target.eos_tokens,
        )

    def write(self, requests: Iterable[TextRequest]) -> Iterator[WrittenText]:
        """Yield each text as soon as it is written.

        Raises:
            ConfigError: a prompt is empty or too long; raised before anything is written.
        """
        waiting, writing = deque(map(self._sheet, requests)), list[_Sheet]()
        longest = max((sheet.request.sampling.max_tokens for sheet in waiting), default=1)
        at_once = min(self._at_once, max(1, LOGITS_BYTES // (4 * longest * self._rules.vocab_size)))
        while waiting or writing:
            writing += self._admit(waiting, writing, at_once - len(writing))
            self._step(writing)
            finished = [sheet for sheet in writing if sheet.session.finish is not None]
            writing = [sheet for sheet in writing if sheet.session.finish is None]
            for sheet in finished:
                self._backend.release(sheet.handle)
            yield from (sheet.text() for sheet in finished)

    def _sheet(self, request: TextRequest) -> _Sheet:
        rules = self._rules
        try:
            frame = Open(rules.model, rules.tokenizer_sha256, request.prompt, request.sampling, "text", drafting=False)
            return _Sheet(request, VerifierSession(frame, rules, 0.0))
        except OutriderError as error:
            where = f"prompt {request.id!r} of {request.domain!r}"
            raise ConfigError(f"{where} {error.message}", field="prompts") from error

    def _admit(self, waiting: deque[_Sheet], writing: Sequence[_Sheet], slots: int) -> list[_Sheet]:
        """Return the texts that begin with the next step: those with a slot, KV pages, and room for their prompts.

        The full pages of a prompt that another text has read are not read again.
        """
        backend, admitted, rows = self._backend, list[_Sheet](), 0
        readers = {sheet.request.prompt: sheet for sheet in writing}
        while waiting and len(admitted) < slots:
            sheet = waiting[0]
            reader = readers.get(sheet.request.prompt)
            capacity = backend.capacity
            rows += sheet.session.prompt_length if reader is None else capacity.page_size
            no_room = capacity.pages_for(sheet.room) > capacity.free_pages
            if no_room or (admitted and (rows > MAX_PROMPT_ROWS or reader in admitted)):
                break
            sheet.handle = backend.open(sheet.session.transcript)
            readers.setdefault(sheet.request.prompt, sheet)
            backend.reserve(sheet.handle, sheet.room)
            admitted.append(waiting.popleft())
        return admitted

    def _step(self, sheets: Sequence[_Sheet]) -> None:
        """Give each sheet its next token."""
        output = self._backend.step([sheet.row(tapped=bool(self._projections)) for sheet in sheets])
        for name, project in self._projections.items():
            indices = [self._tapped.index(layer) for layer in project.layers]
            taps = output.taps.unflatten(1, (len(self._tapped), -1))[:, indices].flatten(1)  # type: ignore[union-attr]
            for sheet, vector in zip(sheets, project(taps), strict=True):
                sheet.vectors.setdefault(name, []).append(vector)
        for sheet, sampled, logits in zip(sheets, output.sampled, output.logits, strict=True):  # type: ignore[arg-type]
            sheet.session.on_verified(Verified((), sampled.tokens), 0.0)  # type: ignore[union-attr]
            sheet.logits.append(logits.clone())  # a view would keep the whole step
