"""How long the parts of a real run take; all that a simulation needs to know of the machines."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds.

    Attributes:
        step_s: of a target step beside its rows.
        row_s: of each row in it.
        min_step_s: a step takes at least so long.
        prefill_row_s: of a prompt's row.
        drafting_s: of a drafted token.
        catch_up_s: of a token that the drafter reads.
        job_s: of handing the drafter a job, whatever its size; the edge does not count it as drafting.
        edge_event_s: from a frame's arrival at the edge until the session machine has it.
        cloud_event_s: from a frame's arrival at the verifier until the engine can use it.
        commit_s: from a step's end until its commit is on the wire and the next may begin.
    """

    step_s: float = 0.012
    row_s: float = 0.001
    min_step_s: float = 0.0
    prefill_row_s: float = 0.0003
    drafting_s: float = 0.0006
    catch_up_s: float = 0.0001
    job_s: float = 0.0002
    edge_event_s: float = 0.0003
    cloud_event_s: float = 0.0003
    commit_s: float = 0.0005

    def batch_s(self, decoding: int, reading: int) -> float:
        """Return what a step takes with rows of sessions that decode, and of those that read a prompt."""
        return max(self.min_step_s, self.step_s + self.row_s * decoding + self.prefill_row_s * reading)

    def verify_s(self, rows: int) -> float:
        """Return what a decoding step of `rows` takes."""
        return self.batch_s(rows, 0)

    def prefill_s(self, rows: int) -> float:
        """Return what a step takes that reads `rows` tokens of a prompt."""
        return self.batch_s(0, rows)

    def propose_s(self, read: int, drafted: int) -> float:
        """Return the drafter's own time for a job that reads `read` tokens and drafts `drafted`."""
        return self.catch_up_s * max(0, read - 1) + self.drafting_s * drafted
