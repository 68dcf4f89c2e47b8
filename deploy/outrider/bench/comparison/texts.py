"""The target's own texts, written once for all drafters; the codes of its hidden states are taken on the way."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from outrider.bench.comparison.codes import Codes
from outrider.cloud.folded_projection import FoldedProjection
from outrider.cloud.kv_cache import SessionCache
from outrider.cloud.sampling import Sampler, VerificationInput
from outrider.cloud.steering import Projection
from outrider.cloud.target import Rows, Target
from outrider.deploy.prompts import Prompt
from outrider.proto.errors import ConfigError, OutriderError
from outrider.proto.session import Verified, VerifierRules, VerifierSession
from outrider.proto.types import Open, Sampling

AT_ONCE = 64  # texts
MOST_PROMPT_ROWS = 1024  # of new prompts in a step
LOGITS_BYTES = 1 << 30  # of texts that are being written, where they are kept


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """A prompt, and what the target says after it.

    Attributes:
        prompt: whose.
        transcript: [p + n] prompt and text.
        prompt_length: p.
        limit: tokens that the text was allowed; it has fewer where it ended by itself.
        codes: by projection, of the positions that the target has processed.
    """

    prompt: Prompt
    transcript: tuple[int, ...]
    prompt_length: int
    limit: int
    codes: Mapping[str, Codes] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """How many of it are text: n."""
        return len(self.transcript) - self.prompt_length


@dataclass(frozen=True, slots=True)
class Wish:
    """A text that is wanted: after which prompt, its tokens [p], and how it is sampled."""

    prompt: Prompt
    tokens: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """A text, and the target's logits [n, vocab] float32 in place of each of its tokens."""

    wish: Wish
    text: Text
    logits: torch.Tensor


@dataclass(slots=True, eq=False)
class _Sheet:
    """A text that is being written: the verifier's half of a session whose edge sends no drafts."""

    prompt: Prompt
    tokens: tuple[int, ...]  # of the prompt
    session: VerifierSession
    cache: SessionCache | None = None
    codes: dict[str, list[np.ndarray]] = field(default_factory=dict)

    @property
    def room(self) -> int:
        """Positions that it may come to need."""
        return self.session.prompt_length + self.session.sampling.max_tokens

    def text(self) -> Text:
        """When it is finished."""
        session = self.session
        processed = len(session.transcript) - 1  # never the last token
        codes = {name: np.stack(rows) for name, rows in self.codes.items()}
        return Text(
            self.prompt,
            tuple(session.transcript),
            session.prompt_length,
            session.sampling.max_tokens,
            {name: Codes(processed - len(rows), rows) for name, rows in codes.items()},
        )


class Writer:
    """Decodes prompts with the target alone, many at once, by the session's own rules and the shared noise.

    So these are the texts that every edge gets from a verifier of this target, whatever it drafts (DESIGN section 1).
    """

    def __init__(self, target: Target, projections: Mapping[str, Projection], *, oldest: int) -> None:
        """Make ready.

        Args:
            target: is tapped from now on, if there is a projection.
            projections: by id, whose codes are wanted.
            oldest: how many positions older than the freshest a code may be; older ones of the prompt are left out.
        """
        self._target = target
        self._sampler = Sampler(target.device)
        self._projections = {name: FoldedProjection(each, target.device) for name, each in projections.items()}
        self._wanted_of_prompt = oldest + 1 if projections else 1
        self._rules = VerifierRules(
            name="writer",
            model="target",
            tokenizer_sha256=target.tokenizer_sha256,
            vocab_size=target.vocab_size,
            context_length=target.context_length,
            eos_tokens=target.eos_tokens,
        )
        if projections:
            target.tap(sorted({layer for each in projections.values() for layer in each.layers}))

    def write(self, prompts: Sequence[tuple[Prompt, tuple[int, ...]]], sampling: Sampling) -> list[Text]:
        """The texts after `prompts`, each with its tokens, in their order.

        Raises:
            ConfigError: a prompt is empty or too long; it is named.
        """
        sheets = [self._sheet(prompt, tokens, sampling) for prompt, tokens in prompts]
        for _ in self._steps(sheets, AT_ONCE):
            pass
        return [sheet.text() for sheet in sheets]

    def stream(self, wishes: Iterable[Wish]) -> Iterator[Written]:
        """The texts that are wished for, each as soon as it is written, with what the target thought of every token.

        Raises:
            ConfigError: as `write`, before anything is written.
        """
        sheets = {self._sheet(wish.prompt, wish.tokens, wish.sampling): wish for wish in wishes}
        longest = max((wish.sampling.max_tokens for wish in sheets.values()), default=1)
        at_once = min(AT_ONCE, max(1, LOGITS_BYTES // (4 * longest * self._target.vocab_size)))
        kept: dict[_Sheet, list[torch.Tensor]] = {}
        for step, logits in self._steps(list(sheets), at_once):
            for sheet, row in zip(step, logits, strict=True):
                kept.setdefault(sheet, []).append(row.clone())  # a view would keep the whole step
            for sheet in step:
                if sheet.session.finish is not None:
                    yield Written(sheets.pop(sheet), sheet.text(), torch.stack(kept.pop(sheet)))

    def _steps(self, sheets: Sequence[_Sheet], at_once: int) -> Iterator[tuple[list[_Sheet], torch.Tensor]]:
        """Until all are finished: the sheets of each step, and the logits [sheets, vocab] of their tokens."""
        waiting, writing = deque(sheets), list[_Sheet]()
        while waiting or writing:
            writing += self._admit(waiting, writing, at_once - len(writing))
            logits = self._step(writing)
            for sheet in writing:
                if sheet.session.finish is not None and sheet.cache is not None:
                    self._target.pool.release(sheet.cache)
            yield writing, logits
            writing = [sheet for sheet in writing if sheet.session.finish is None]

    def _sheet(self, prompt: Prompt, tokens: tuple[int, ...], sampling: Sampling) -> _Sheet:
        rules = self._rules
        try:
            frame = Open(rules.model, rules.tokenizer_sha256, tokens, sampling, "text", drafting=False)
            return _Sheet(prompt, tokens, VerifierSession(frame, rules, 0.0))
        except OutriderError as error:
            raise ConfigError(f"prompt {prompt.id!r} of {prompt.domain!r} {error.message}", field="prompts") from error

    def _admit(self, waiting: deque[_Sheet], writing: Sequence[_Sheet], places: int) -> list[_Sheet]:
        """Those that begin with the next step: as many as have a place, KV pages, and room for their prompts.

        A prompt that is being written after is not read again, but taken from there once it has been read.
        """
        pool, admitted, rows = self._target.pool, list[_Sheet](), 0
        readers = {sheet.tokens: sheet for sheet in writing} if waiting and places else {}
        while waiting and len(admitted) < places and pool.pages_for(waiting[0].room) <= pool.free_pages:
            # Codes need the hidden states of every prompt.
            reader = None if self._projections else readers.get(waiting[0].tokens)
            rows += waiting[0].session.prompt_length if reader is None else 1
            if admitted and (rows > MOST_PROMPT_ROWS or reader in admitted):
                break
            sheet = waiting.popleft()
            sheet.cache = pool.allocate(sheet.room)
            if reader is None:
                readers[sheet.tokens] = sheet
            elif reader.cache is not None:
                self._copy(reader.cache, sheet.cache, sheet.session.prompt_length - 1)
            admitted.append(sheet)
        return admitted

    @torch.inference_mode()
    def _copy(self, source: SessionCache, copy: SessionCache, length: int) -> None:
        """Let `copy` hold the first `length` positions of `source` too."""
        pool = self._target.pool
        for layer in range(self._target.model.config.get_text_config().num_hidden_layers):
            keys, values = (rows.clone() for rows in pool.read(layer, source, length))  # it reads views of itself
            pool.write(layer, copy.slots[:length], keys, values)
        copy.length = length

    def _step(self, sheets: Sequence[_Sheet]) -> torch.Tensor:
        """The logits [sheets, vocab] of the token that each gets."""
        batch = [self._rows(sheet) for sheet in sheets]
        logits = self._target.forward(batch)
        ends = list(itertools.accumulate(rows.wanted for rows in batch))
        self._take_codes(sheets, ends)
        judged = [
            VerificationInput(sheet.session.sampling, sheet.session.transcript, sheet.session.prompt_length, ())
            for sheet in sheets
        ]
        logits = logits[[end - 1 for end in ends]]
        sampled = self._sampler.sample(logits, judged)
        for sheet, result in zip(sheets, sampled, strict=True):
            sheet.session.on_verified(Verified((), result.tokens, result.logp), 0.0)
        return logits

    def _rows(self, sheet: _Sheet) -> Rows:
        if sheet.cache is None:
            raise RuntimeError("a text is written before it is admitted")
        tokens = tuple(sheet.session.transcript[sheet.cache.length :])
        return Rows(sheet.cache, tokens, min(len(tokens), self._wanted_of_prompt))

    def _take_codes(self, sheets: Sequence[_Sheet], ends: Sequence[int]) -> None:
        """Keep the codes of all rows of the newest logits; those of sheets[i] end before ends[i]."""
        for name, project in self._projections.items():
            codes = project(self._target.tapped(project.layers, range(ends[-1])))
            for sheet, first, end in zip(sheets, (0, *ends), ends, strict=False):
                sheet.codes.setdefault(name, []).extend(codes[first:end])
