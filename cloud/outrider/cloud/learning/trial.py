"""The memory of a judge, which outlives its process: what it has seen, and each text of the trial that is under way.

A bet that was seen to be lost must not be taken back, or a trial would be worth nothing: whoever can end the process
at will could have it forget what spoke against a candidate. So each text is in the journal before it counts, and a
trial is resumed with all of them. Checkpoints hold the rest. Both have hashes, numbers and salts, and no text.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from outrider.proto.policy.sequential import MIN_CLASS_SHARE, SignTest, candidate_error, clipped

MAX_SEEN = 1 << 17
NAME_BYTES = 16
WATCHED_TEXTS = 500  # after which a comparison with the parent begins again
RECENT_TEXTS = 1000.0  # over which the kinds of traffic fade


@dataclass(frozen=True, slots=True)
class JudgedText:
    """A text that a candidate was judged on.

    Attributes:
        difference: hit rate of the candidate less that of the current drafter.
        prompt_class: kind of text.
        key: salted hash of its API key.
        names: hashes of its session and of its beginning, by which it is known again.
    """

    difference: float
    prompt_class: int
    key: bytes
    names: tuple[bytes, ...]

    def line(self) -> str:
        """Return it as a line of JSON."""
        return json.dumps([self.difference, self.prompt_class, self.key.hex(), [name.hex() for name in self.names]])

    @classmethod
    def from_line(cls, line: str) -> Self:
        """Restore what `line` returned; raises `ValueError` or `TypeError` if it is malformed."""
        difference, *_, prompt_class, key, names = json.loads(line)  # older releases wrote one more number between
        restored = tuple([bytes.fromhex(name) for name in names])
        return cls(float(difference), int(prompt_class), bytes.fromhex(key), restored)


@dataclass(frozen=True, slots=True)
class OpenTrial:
    """A trial that is under way.

    Attributes:
        sequence: that of the candidate's package.
        number: which candidate it is, from 1.
        kept: kinds of text that it must be known to keep.
    """

    sequence: int
    number: int
    kept: tuple[int, ...]


@dataclass(slots=True)
class VersionWatch:
    """Comparison of the version that drafts with its parent, on texts since it was published.

    It lasts for `WATCHED_TEXTS`, since what is asked for changes, and each needs more evidence than the one before: the
    chance that a version which hits no less than its parent is ever retired is a hundredth.

    Attributes:
        version: version that drafts.
        number: which comparison it is, of all versions, from 1.
        loses: test of whether it hits less.
        difference: sum of the differences of hit rates.
    """

    version: str
    number: int
    loses: SignTest = field(default_factory=SignTest)
    difference: float = 0.0

    def add(self, difference: float) -> None:
        """Count a text: hit rate of the version less that of its parent."""
        self.loses.add(-clipped(difference))
        self.difference += difference

    @property
    def reason(self) -> str:
        """Reason in a few words for which the version is to be retired; empty: there is none."""
        if not self.loses.shows(candidate_error(self.number)):
            return ""
        return f"hits {self.difference / self.loses.count:+.3f} against its parent in {self.loses.count} texts"

    def next(self, version: str) -> VersionWatch:
        """Return the comparison that the next text of this version belongs to."""
        if version == self.version and self.loses.count < WATCHED_TEXTS:
            return self
        return VersionWatch(version, self.number + 1)

    def saved(self) -> list[Any]:
        """Return it for a JSON file."""
        return [self.version, self.number, self.loses.row(), self.difference]

    @classmethod
    def restored(cls, saved: Sequence[Any]) -> Self:
        """Restore what `saved` returned; raises `ValueError` or `TypeError` if it is malformed."""
        version, number, row, difference = saved
        return cls(str(version), int(number), SignTest.from_row(row), float(difference))


@dataclass(slots=True)
class JudgeMemory:
    """Everything that a judge must not forget during a trial, or between two.

    Attributes:
        trial: the present one; None: there is none.
        watch: comparison of the version that drafts, or of the last one that was watched; None: there was none.
        kinds: texts by kind, of which the older ones have faded.
        seen: names of texts that came, the newest last.
    """

    trial: OpenTrial | None = None
    watch: VersionWatch | None = None
    kinds: dict[int, float] = field(default_factory=dict)
    seen: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def see(self, names: Iterable[bytes]) -> bool:
        """Note a text by its names, and return whether all of them are new."""
        fresh = True
        for name in names:
            fresh = fresh and name not in self.seen
            self.seen[name] = None
            self.seen.move_to_end(name)
        while len(self.seen) > MAX_SEEN:
            self.seen.popitem(last=False)
        return fresh

    def count(self, prompt_class: int) -> None:
        """Count a text of this kind."""
        self.kinds = {which: texts * (1 - 1 / RECENT_TEXTS) for which, texts in self.kinds.items()}
        self.kinds[prompt_class] = self.kinds.get(prompt_class, 0.0) + 1

    def common(self) -> tuple[int, ...]:
        """Return the kinds that a tenth or more of the newest texts have."""
        total = sum(self.kinds.values())
        return tuple(sorted(which for which, texts in self.kinds.items() if texts >= MIN_CLASS_SHARE * total))

    def saved(self) -> dict[str, Any]:
        """Return all but the names for a JSON file."""
        trial = self.trial
        return {
            "trial": [trial.sequence, trial.number, list(trial.kept)] if trial else None,
            "watch": self.watch.saved() if self.watch else None,
            "kinds": sorted(self.kinds.items()),
        }

    def saved_names(self) -> np.ndarray:
        """Return the names, the newest last: [n, NAME_BYTES] uint8."""
        return np.frombuffer(b"".join(self.seen), np.uint8).reshape(-1, NAME_BYTES)

    @classmethod
    def restored(cls, saved: Mapping[str, Any], names: np.ndarray) -> Self:
        """Return what was saved.

        Raises:
            KeyError, ValueError, TypeError: it is malformed.
        """
        trial = None
        if saved["trial"] is not None:
            sequence, number, kept = saved["trial"]
            trial = OpenTrial(int(sequence), int(number), tuple(map(int, kept)))
        watch = VersionWatch.restored(saved["watch"]) if saved["watch"] is not None else None
        kinds = {int(which): float(texts) for which, texts in saved["kinds"]}
        return cls(trial, watch, kinds, OrderedDict.fromkeys(name.tobytes() for name in names))


class TrialJournal:
    """The file of the texts of a trial, one a line.

    Args:
        path: of the file, which need not be there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, sequence: int, texts: Iterable[JudgedText] = ()) -> None:
        """Begin the trial of the candidate `sequence`, with texts that it was judged on before."""
        unfinished = self._path.with_name(f".{self._path.name}.unfinished")
        lines = [json.dumps({"sequence": sequence}), *(text.line() for text in texts)]
        unfinished.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        os.replace(unfinished, self._path)

    def append(self, text: JudgedText) -> None:
        """Add a text, which may count from now on."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text.line() + "\n")

    def resume(self, sequence: int) -> list[JudgedText]:
        """Return the texts of the candidate `sequence`, and go on behind them; a last line that was cut short is none.

        Raises:
            ValueError, TypeError, KeyError, OSError: there is no such journal, or it is broken.
        """
        first, *lines = self._path.read_text(encoding="utf-8").split("\n")
        if json.loads(first)["sequence"] != sequence:
            raise ValueError(f"{self._path} is of another trial")
        texts = [JudgedText.from_line(line) for line in lines[:-1]]  # behind the last line's end is nothing, or a part
        self.begin(sequence, texts)
        return texts
