"""The tokens of API keys as a verifier meters them: those that texts read and no cache held, and those of the texts."""

from __future__ import annotations

import time
from collections.abc import Callable

from outrider.proto.errors import ResourceExhausted
from outrider.proto.lease import LeaseClaim
from outrider.proto.plumbing.access import Bucket, Meters
from outrider.proto.types import Commit, Goaway, Open

REFILL = 0.1  # share of a minute's tokens before a session whose key had spent them returns: that costs a prefill


class TextMeter:
    """The tokens that one stream takes out of its key's bucket.

    What it reads is taken out before it is read, and what turns out to be cached is given back. No text is cut off for
    its own prompt, however long that is: it delays the key's next ones.
    """

    def __init__(self, key: str, bucket: Bucket, clock: Callable[[], float] = time.monotonic) -> None:
        self._key = key
        self._bucket = bucket
        self._clock = clock
        self._turns = 0
        self._prepaid: dict[int, int] = {}  # by turns whose first commit has not come
        self._read = 0

    def begin_turn(self, tokens: int) -> None:
        """Take out the tokens that a turn brings.

        Raises:
            ResourceExhausted: the key has none left; `retry_after_s` is set.
        """
        wait_s = self._bucket.wait_s(1, self._clock())
        if wait_s > 0:
            rate = self._bucket.tokens_per_minute
            spent = f"key {self._key!r} has spent its {rate} tokens a minute; wait {wait_s:.1f} s"
            raise ResourceExhausted(spent, field="api_key", retry_after_s=wait_s)
        self._read, self._prepaid[self._turns] = 0, tokens
        self._turns += 1
        self._spend_on_reading(tokens)

    def charge(self, commit: Commit, epoch: int) -> Goaway | None:
        """Take a commit's tokens from the key's bucket; return what ends the stream where the bucket is empty."""
        self.spend(commit)
        wait_s = self.wait_s
        return Goaway("the key's tokens a minute are spent", retry_after_s=wait_s, epoch=epoch) if wait_s > 0 else None

    def give_back(self) -> None:
        """Put the prompt's tokens back into the bucket: the session was refused before any was read."""
        self._bucket.spend(-self._read, self._clock())
        self._read = 0

    def spend(self, commit: Commit) -> None:
        """Take out the tokens of a commit, and with the first of a turn settle what was read for it."""
        self._bucket.spend(len(commit.tokens), self._clock())
        if commit.tokens and commit.turn in self._prepaid:
            self._spend_on_reading(commit.start - commit.cached_tokens - self._prepaid.pop(commit.turn))

    @property
    def wait_s(self) -> float:
        """Seconds until the stream should come back, since its key has no token left for its text; 0: it may stay."""
        now_s = self._clock()
        if self._bucket.level(now_s) >= -self._read:
            return 0.0
        return self._bucket.wait_s(max(1.0, REFILL * self._bucket.tokens_per_minute), now_s)

    def _spend_on_reading(self, tokens: int) -> None:
        self._read += tokens
        self._bucket.spend(tokens, self._clock())


def meter_of(
    meters: Meters, claim: LeaseClaim | None, frame: Open, clock: Callable[[], float] = time.monotonic
) -> TextMeter | None:
    """Return the meter of the stream that `frame` opens, for its first turn; None: its lease's key has no limit.

    Raises:
        ResourceExhausted: as `TextMeter.begin_turn` does.
    """
    if claim is None or not claim.tokens_per_minute:
        return None
    meter = TextMeter(claim.key, meters.of(claim.key, claim.tokens_per_minute, clock()), clock)
    meter.begin_turn(len(frame.prompt) + len(frame.committed))
    return meter
