"""The number of further tokens that may be drafted: credit, length of the text and of a job, and the window."""

from __future__ import annotations

from collections.abc import Callable

from outrider.proto.policy import Window
from outrider.proto.policy.window import UNKNOWN_PRICE, DraftPrice
from outrider.proto.session.chain import Chain
from outrider.proto.session.measuring import DRAFT_BYTES, Meter
from outrider.proto.session.stream import EdgeStream
from outrider.proto.session.text import EdgeText


class Allowance:
    """The tokens that the next job may draft, computed once for each event that can change them."""

    def __init__(
        self,
        text: EdgeText,
        chain: Chain,
        stream: EdgeStream,
        meter: Meter,
        *,
        window: Window,
        job_tokens: Callable[[float], int],
    ) -> None:
        """Ask `window` in the text's state; the others are those of `Drafting`."""
        self._text = text
        self._chain = chain
        self._stream = stream
        self._meter = meter
        self._window = window
        self._price = UNKNOWN_PRICE
        self._price_at = -1  # revision of the measurements
        self._job_tokens = job_tokens
        self._known, self._known_of = 0, -1  # tokens since the last review, and their drafter; -1: none

    def review(self) -> None:
        """Compute the tokens once more, now that an event may have changed what they depend on."""
        self._known_of = -1

    def tokens(self, drafter: int) -> int:
        """Return how many more tokens that drafter may draft in the next job."""
        if self._known_of != drafter:
            self._known, self._known_of = self._tokens(drafter), drafter
        return self._known

    def _tokens(self, drafter: int) -> int:
        text, stream, meter = self._text, self._stream, self._meter
        in_flight = len(self._chain.drafts)
        room = min(stream.credit, stream.max_tokens - text.generated - 1) - in_flight
        if room <= 0 or not stream.takes_drafts or text.done:
            return 0
        mine = meter.drafter(drafter)
        drafting_s = mine.drafting_s.value
        if self._price_at != meter.revision:
            self._price_at, self._price = meter.revision, self._price_of()
        return self._window.more(
            self._price,
            min(room, self._job_tokens(drafting_s)),
            in_flight=in_flight,
            survival=meter.survival(self._chain, drafter),
            acceptance=mine.calibration.acceptance.rate,
            drafting_s=drafting_s,
            covered=stream.covered,
        )

    def _price_of(self) -> DraftPrice:
        """Return the price of a draft by the present measurements."""
        measured = self._meter.measurements
        step_s, row_s = measured.step.fit()
        trip_s, byte_s = measured.round_trip.fit()
        return self._window.price(
            step_s=step_s,
            row_s=row_s,
            round_trip_s=trip_s + byte_s * DRAFT_BYTES,
            byte_s=byte_s,
            token_s=measured.pace.token_s,
            goal=self._stream.terms.goal,
        )
