"""Memory of the verifiers that were given texts with certain beginnings, whose KV pages they are likely to hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from outrider.coordinator.cluster import VerifierInfo

MAX_REMEMBERED = 1 << 16  # beginnings: those of some 3,000 long texts
MAX_HOLDERS = 4  # of one beginning

# A restarted verifier has another address or number of restarts, and nothing in its cache.
_Holder = tuple[str, str, int]


class PrefixMemory:
    """Remembers beginnings by their hashes (see `LeaseRequest.prefixes`), the most recently leased ones.

    It is a guess: verifiers evict pages without a word, and a leased text may never have been opened.

    Args:
        max_remembered: beginnings at most; then the least recently leased are forgotten.
    """

    def __init__(self, max_remembered: int = MAX_REMEMBERED) -> None:
        self._max_remembered = max_remembered
        self._holders: OrderedDict[tuple[str, int], tuple[_Holder, ...]] = OrderedDict()  # newest holder first

    def __len__(self) -> int:
        return len(self._holders)

    def note(self, tenant: str, prefixes: Sequence[int], verifier: VerifierInfo) -> None:
        """Note that a text of `tenant` with these beginnings goes to `verifier`."""
        holder = _holder(verifier)
        for prefix in reversed(prefixes):  # so that a text's longest beginnings are forgotten first
            others = (other for other in self._holders.pop((tenant, prefix), ()) if other != holder)
            self._holders[tenant, prefix] = (holder, *others)[:MAX_HOLDERS]
        while len(self._holders) > self._max_remembered:
            self._holders.popitem(last=False)

    def find(self, tenant: str, prefixes: Sequence[int], verifiers: Sequence[VerifierInfo]) -> dict[str, int]:
        """Return the number of these beginnings, the shortest first, that each verifier took; those with none lack."""
        names = {_holder(verifier): verifier.name for verifier in verifiers}
        found: dict[str, int] = {}
        for count, prefix in enumerate(prefixes, 1):
            holders = self._holders.get((tenant, prefix))
            if holders is None:
                break
            found.update((names[holder], count) for holder in holders if holder in names)
        return found


def _holder(verifier: VerifierInfo) -> _Holder:
    return verifier.name, verifier.address, verifier.restarts
