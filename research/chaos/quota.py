"""Price that the texts of a key must have at a verifier, counted from their frames beside the shipped meters."""

from __future__ import annotations

from outrider.cloud.serving.metering import TextMeter
from outrider.proto.plumbing.access import Bucket, Meters
from outrider.proto.types import Commit, Continue, Open
from research.chaos.world import Violation


class CountedBucket(Bucket):
    """A bucket that notes what is taken out of it.

    Attributes:
        spent: tokens taken out so far.
    """

    spent = 0.0

    def spend(self, tokens: float, now_s: float) -> None:
        """Take tokens out."""
        self.spent += tokens
        super().spend(tokens, now_s)


class CountedMeters(Meters):
    """The buckets of one process, and what its streams must have cost.

    Attributes:
        due: tokens that the streams that have ended must have cost.
    """

    def __init__(self) -> None:
        super().__init__()
        self.due = 0

    def of(self, name: str, tokens_per_minute: int, now_s: float) -> Bucket:
        """Return the bucket of key `name`, which fills at this rate from now on."""
        self._buckets.setdefault(name, CountedBucket(tokens_per_minute, now_s))
        return super().of(name, tokens_per_minute, now_s)

    def check(self, who: str) -> None:
        """Fail where keys have paid for more or less than their streams have cost, once all have ended."""
        spent = sum(bucket.spent for bucket in self._buckets.values() if isinstance(bucket, CountedBucket))
        if abs(spent - self.due) > 1e-6:
            raise Violation(f"{who} has charged {spent:g} tokens for {self.due}")


class StreamCost:
    """The cost of one stream: what its turns bring until they are read, then what was read, and what was generated.

    Attributes:
        tokens: cost so far.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._turns = 0
        self._brought: dict[int, int] = {}  # by turns that are not read yet
        self._read = 0

    def begin(self, frame: Open | Continue) -> None:
        """Count a turn that has been taken."""
        brought = len(frame.prompt) + (len(frame.committed) if isinstance(frame, Open) else 0)
        self._brought[self._turns] = self._read = brought
        self._turns += 1
        self.tokens += brought

    def refuse(self) -> None:
        """Count a stream that was refused, and has cost nothing."""
        self.tokens = 0

    def commit(self, commit: Commit) -> None:
        """Count a commit that has left."""
        self.tokens += len(commit.tokens)
        if commit.tokens and commit.turn in self._brought:
            more = commit.start - commit.cached_tokens - self._brought.pop(commit.turn)
            self.tokens += more
            self._read += more

    def check_stays(self, meter: TextMeter, now: float, who: str) -> None:
        """Fail where a text goes on though its key has spent more than what the text itself has read."""
        if (level := meter._bucket.level(now)) < -self._read:
            raise Violation(f"{who} goes on with {level:.1f} tokens of its key, having read {self._read}")
