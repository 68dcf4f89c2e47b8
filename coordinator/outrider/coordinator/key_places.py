"""The places of API keys over all verifiers: leases that may become texts, and the texts that go on. Pure.

A place lives as long as its text. Edges report an end at once; verifiers say what goes on, whatever edges report. What
one coordinator forgets, or another has granted, counts as soon as a verifier says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from outrider.coordinator.cluster import SendAway, VerifierInfo, VerifierState
from outrider.proto.lease import text_name

RESUME_S = 60.0  # for which an edge tries to open a stream, so that its text keeps the place meanwhile
ENDING_S = 1.0  # from an edge's report until its verifier has noticed

Text = tuple[str, str]  # names of API key and session


@dataclass(slots=True)
class _Leased:
    verifier: str
    until_s: float
    seen_s: float  # when it was granted or was last known to go on


@dataclass(frozen=True, slots=True)
class _Listed:
    verifier: str
    age_s: float
    name: str  # by which its verifier ends it


class KeyPlaces:
    """Places of all keys; times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._leased: dict[Text, _Leased] = {}
        self._listed: dict[str, dict[str, _Listed]] = {}  # by key and session
        self._ended: dict[Text, float] = {}
        self._asked_s = float("-inf")
        self._suspected: frozenset[str] = frozenset()

    def held(self, key: str, now_s: float) -> frozenset[str]:
        """Return the sessions that have a place of `key`."""
        self._expire(now_s)
        leased = frozenset(session for name, session in self._leased if name == key)
        believed = key not in self._suspected  # in its reports of ends
        return leased | {
            session for session in self._listed.get(key, ()) if not (believed and self._is_ending(key, session))
        }

    def is_leased(self, key: str, session: str, now_s: float) -> bool:
        self._expire(now_s)
        return (key, session) in self._leased

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(name for name, _ in self._leased) | self._listed.keys()

    def take(self, key: str, session: str, verifier: str, now_s: float, until_s: float) -> None:
        """Give a session that has a lease for `verifier` a place until it ends, or until `until_s`."""
        self._ended.pop((key, session), None)
        self._leased[key, session] = _Leased(verifier, until_s, now_s)

    def free(self, key: str, session: str, now_s: float) -> None:
        """Free the place of a session whose edge says that its text has ended."""
        self._leased.pop((key, session), None)
        self._ended[key, session] = now_s
        for text in [text for text, at_s in self._ended.items() if at_s < self._asked_s - ENDING_S]:
            del self._ended[text]

    def observe(
        self, verifiers: Iterable[VerifierInfo], asked_s: float, limit: Callable[[str], int | None]
    ) -> SendAway:
        """Take in what verifiers say of their texts, and return which of these must not go on.

        A key that had too many texts at the last poll as well loses the youngest beyond its limit. Once may be
        chance, since verifiers answer one after the other.

        Args:
            verifiers: all that are known.
            asked_s: time before they were asked.
            limit: texts that a key may have at once, by its name; None: any number.
        """
        answered = {v.name: v for v in verifiers if v.lists_texts and v.state is not VerifierState.DOWN}
        self._listed, self._asked_s = {}, asked_s
        for key, session, listed in _texts(answered.values()):
            before = self._listed.get(key, {}).get(session)
            if before is None or listed.age_s < before.age_s:  # it goes on in the younger stream
                self._listed.setdefault(key, {})[session] = listed
        for (key, session), leased in list(self._leased.items()):
            if session in self._listed.get(key, ()):
                leased.seen_s = asked_s
            elif leased.verifier in answered and leased.seen_s < asked_s - RESUME_S:
                del self._leased[key, session]
        return self._excess(limit)

    def _excess(self, limit: Callable[[str], int | None]) -> SendAway:
        limits = {key: limit(key) for key in self._listed}
        suspected, self._suspected = (
            self._suspected,
            frozenset(key for key, most in limits.items() if most is not None and len(self._listed[key]) > most),
        )
        away: dict[str, frozenset[str]] = {}
        for key in suspected & self._suspected:
            texts = sorted(self._listed[key].items(), key=lambda text: (text[1].age_s, text[0]))
            for session, listed in texts[: len(texts) - (limits[key] or 0)]:
                away[listed.verifier] = away.get(listed.verifier, frozenset()) | {listed.name}
                self._leased.pop((key, session), None)  # it comes back where there is a place, with another lease
        return away

    def _is_ending(self, key: str, session: str) -> bool:
        """Return whether the edge has reported its end, and the verifier may not have noticed yet."""
        return self._ended.get((key, session), float("-inf")) > self._asked_s - ENDING_S

    def _expire(self, now_s: float) -> None:
        for text in [text for text, leased in self._leased.items() if leased.until_s < now_s]:
            del self._leased[text]


def _texts(verifiers: Iterable[VerifierInfo]) -> Iterator[tuple[str, str, _Listed]]:
    for verifier in verifiers:
        for key, ages in verifier.texts_of_keys.items():
            for session, age_s in ages.items():
                name = text_name(key, session) if verifier.ends_texts_of_keys else session
                yield key, session, _Listed(verifier.name, age_s, name)
