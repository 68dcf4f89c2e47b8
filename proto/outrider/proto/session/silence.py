"""The watch over one stream: when to ask its verifier for a sign of life, and when its silence is suspect.

Silence counts only while an answer is due: from the sending of the Open until the first frame, and from that of a Ping,
which goes where no frame has come for a while. So a verifier that has nothing to say (a long prompt, patience, an edge
without credit) is never suspect while it answers, and a kept session that nobody uses is not watched. Time in which
the watcher itself stood still does not count either.

A shell calls `look` at `next_look`, or some time later, and `hear` for every frame.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.proto.policy.suspicion import AnswerLaw, SilenceRules
from outrider.proto.types import CloudFrame, Ping, Pong

LOOK_S = 0.1  # while an answer is due
_FIRST_WAIT_S, _MAX_WAIT_S = 1.0, 8.0  # until a suspicion that came to nothing is raised again


@dataclass(frozen=True, slots=True)
class Silent:
    """The stream is suspect after `silence_s` seconds in which an answer was due, `bound_s` of them expected.

    Attributes:
        again: whether the same silence was suspect before.
    """

    silence_s: float
    bound_s: float
    again: bool = False


class SilenceWatch:
    """Watch over one stream from the sending of its Open on; times are seconds on one clock."""

    def __init__(self, law: AnswerLaw, rules: SilenceRules, now: float) -> None:
        """Begin when the Open is sent.

        Args:
            law: law of this edge's answers, which the watch teaches.
            rules: bounds.
            now: time of sending.
        """
        self._law = law
        self._rules = rules
        self._opening = True
        self._heard_at = now
        self._due_since: float | None = now
        self._number = 0
        self._asked_at: float | None = None  # sending of the newest Ping, until it is answered
        self._wait_s = 0.0
        self._suspect_from = now
        self.next_look = now + LOOK_S

    @property
    def silent(self) -> bool:
        """Whether an answer is due."""
        return self._due_since is not None

    def hear(self, frame: CloudFrame, now: float) -> None:
        """Note a frame of the stream: there is no silence."""
        if isinstance(frame, Pong) and frame.number == self._number and self._asked_at is not None:
            self._law.add(now - self._asked_at)
            self._asked_at = None
        self._opening = False
        self._heard_at = now
        self._due_since = None
        self._wait_s = 0.0

    def resume(self, now: float) -> None:
        """Begin once more with a stream that has been idle, and was not watched."""
        self._heard_at, self._due_since, self._asked_at = now, None, None
        self.next_look = now + self._rules.quiet_s

    def postpone(self, now: float) -> None:
        """Leave the silence alone for a while, longer each time: there is nowhere to go."""
        self._wait_s = min(max(_FIRST_WAIT_S, 2 * self._wait_s), _MAX_WAIT_S)
        self._suspect_from = now + self._wait_s
        self.next_look = now + LOOK_S

    def look(self, now: float, usual_s: float) -> Ping | Silent | None:
        """Return the Ping to send now, or that the stream is silent.

        Args:
            now: present time.
            usual_s: usual round trip of a small message, in seconds; 0: unknown.
        """
        late_s = now - self.next_look
        if late_s > self._rules.late_s and self._due_since is not None:
            self._due_since += late_s  # this side stood still, perhaps with the answer unread
            self._asked_at = None
        if self._due_since is None:
            return self._ask(now)
        self.next_look = now + LOOK_S
        silence_s, bound_s = now - self._due_since, self.bound_s(usual_s)
        if silence_s < bound_s or now < self._suspect_from:
            return None
        return Silent(silence_s, bound_s, again=self._wait_s > 0)

    def bound_s(self, usual_s: float) -> float:
        """Return the seconds after which an answer that is due is suspect."""
        rules = self._rules
        least_s = rules.opening_s if self._opening else rules.min_s
        trips = 4 if self._opening else 1  # TCP, TLS and HTTP/2 shake hands first
        return min(rules.max_s, max(least_s, trips * self._law.bound_s(rules.phi, usual_s)))

    def _ask(self, now: float) -> Ping | None:
        """Return a Ping where the stream is quiet."""
        if now < self._heard_at + self._rules.quiet_s:
            self.next_look = self._heard_at + self._rules.quiet_s
            return None
        self._number += 1
        self._asked_at = self._due_since = now
        self._suspect_from = now
        self.next_look = now + LOOK_S
        return Ping(self._number)
