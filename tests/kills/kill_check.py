"""The fate of every text while processes were killed, and the rules that it must keep."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from kill_plan import KINDS
from killed_fleet import KilledFleet
from killed_texts import TextRun

MAX_GROWTH_MIB = 48.0
MAX_MORE_DESCRIPTORS = 16
DEFECTS = ("traceback", "critical")
LOST = "the stream is lost"


@dataclass(frozen=True)
class Sent:
    """A signal that was sent; `moment` and `until` are on the monotonic clock, `process` is the process that got it."""

    member: str
    kind: str
    signal: str
    process: int
    moment: float
    until: float


@dataclass(frozen=True)
class Held:
    """Memory in MiB and descriptors of one process while nobody asks for anything."""

    process: int
    resident_mib: float
    descriptors: int


@dataclass
class Row:
    """Counts of one kind of process and one signal."""

    process: str
    signal: str
    sent: int = 0
    texts: int = 0
    same: int = 0
    lost: int = 0
    reopened: int = 0
    worst_gap_s: float = 0.0


@dataclass
class KillRun:
    """Everything that is known of a run.

    Attributes:
        killed: processes that were killed on purpose.
        unexpected: exit statuses, by member, of processes that ended by themselves.
        before: processes while nothing ran, in the middle of the run.
        after: the same at its end; those that were not killed meanwhile must not have grown.
        left: processes that outlived the end, by name.
        logged: lines of logs that tell of a defect.
        reopened: streams that were lost and opened again, as (request id, verifier, moment).
    """

    sent: list[Sent] = field(default_factory=list)
    runs: Sequence[TextRun] = ()
    killed: set[int] = field(default_factory=set)
    unexpected: dict[str, list[int]] = field(default_factory=dict)
    before: dict[str, Held] = field(default_factory=dict)
    after: dict[str, Held] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    logged: list[str] = field(default_factory=list)
    reopened: list[tuple[str, str, float]] = field(default_factory=list)

    def excused(self, run: TextRun) -> bool:
        """Whether a text may have ended with an error: the process that served it was killed."""
        return run.process in self.killed

    def violations(self) -> list[str]:
        """Return what must not be, one line each."""
        found = []
        for run in self.runs:
            if run.done and run.text != run.question.text:
                found.append(f"text {run.request_id} is not its oracle's: {run.text[:200]!r}")
            elif not run.question.text.startswith(run.text):
                found.append(f"text {run.request_id} is wrong before it ends with an error: {run.text[:200]!r}")
            elif not run.done and not self.excused(run):
                found.append(f"text {run.request_id} of a {run.daemon} that nobody killed ends with {run.error!r}")
        found += [
            f"{name} ended by itself, with status {status}" for name, all_ in self.unexpected.items() for status in all_
        ]
        for name, held in self.after.items():
            before = self.before.get(name)
            if before is None or before.process != held.process:
                continue
            if held.resident_mib - before.resident_mib > MAX_GROWTH_MIB:
                found.append(f"{name} has grown from {before.resident_mib:.0f} to {held.resident_mib:.0f} MiB")
            if held.descriptors - before.descriptors > MAX_MORE_DESCRIPTORS:
                found.append(f"{name} had {before.descriptors} descriptors and has {held.descriptors}")
        found += [f"{name}, process {pid}, is left running" for name, pid in self.left.items()]
        return found + [f"logged: {line[:300]}" for line in self.logged]

    def table(self) -> list[Row]:
        """Return one row for each kind of process and signal.

        A text counts where it ran at the moment; one that was lost counts for the kill of its own daemon alone.
        """
        rows = {(kind, signal): Row(kind, signal) for kind in KINDS for signal in ("KILL", "STOP")}
        for sent in self.sent:
            row = rows[sent.kind, sent.signal]
            row.sent += 1
            for run in self.runs:
                own = sent.kind != "daemon" or run.process == sent.process
                if not own or not (run.done or (sent.signal == "KILL" and run.process == sent.process)):
                    continue
                gap_s = run.gap_over(sent.moment, sent.until)
                if not gap_s:
                    continue
                row.texts += 1
                row.same += run.done
                row.lost += not run.done
                if run.done:
                    row.worst_gap_s = max(row.worst_gap_s, gap_s)
        for _, verifier, moment in self.reopened:
            cause = self._cause(verifier, moment)
            if cause is not None:
                rows[cause.kind, cause.signal].reopened += 1
        return list(rows.values())

    def _cause(self, verifier: str, moment: float) -> Sent | None:
        """Return the newest signal to that verifier or its link before a stream was lost; of none known, to any."""
        names = {f"verifier-{verifier}", f"link-{verifier}"}
        before = [each for each in self.sent if each.moment <= moment and each.kind in ("verifier", "link")]
        own = [each for each in before if each.member in names or not verifier]
        return max(own, key=lambda each: each.moment, default=None)


def held_by(fleet: KilledFleet) -> dict[str, Held]:
    """Return what every process of a fleet holds now."""
    return {name: Held(member.pid, *member.holds()) for name, member in fleet.members.items()}


def read_logs(files: Iterable[Path], offset_s: float) -> tuple[list[str], list[tuple[str, str, float]]]:
    """Return the lines of logs that tell of a defect, and the streams lost; `offset_s`: monotonic less wall clock."""
    defects, lost = [], []
    for file in files:
        for line in file.read_text(errors="replace").splitlines() if file.exists() else ():
            try:
                record = json.loads(line)
            except ValueError:
                defects.append(f"{file.name}: {line}")  # nothing but its logger writes there
                continue
            if record["level"] in DEFECTS or "traceback" in record:
                defects.append(f"{file.name}: {line}")
            elif record["message"].startswith(LOST):
                moment = datetime.fromisoformat(record["time"]).timestamp() + offset_s
                lost.append((record.get("session", ""), record.get("verifier", ""), moment))
    return defects, lost


def lines_of(rows: Sequence[Row]) -> list[str]:
    """Return the table as text."""
    heads = ("process", "signal", "sent", "texts", "same", "lost", "reopened", "worst gap")
    lines = ["".join(f"{head:>12}" for head in heads)]
    for row in rows:
        cells = (
            row.process,
            row.signal,
            row.sent,
            row.texts,
            row.same,
            row.lost,
            row.reopened,
            f"{row.worst_gap_s:.2f} s",
        )
        lines.append("".join(f"{cell:>12}" for cell in cells))
    return lines


def ends_of(runs: Sequence[TextRun]) -> Counter[str]:
    """Return the number of texts by their end."""
    return Counter("whole" if run.done else "lost with its daemon" for run in runs)
