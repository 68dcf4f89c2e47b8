"""Records in docs/figures that today's commands write."""

from __future__ import annotations

import json

from outrider.bench.record import from_json, to_json
from outrider.deploy.arguments import read_text
from research.traces.pool_replay import PoolReplayed


def test_the_committed_record_of_selectors_loads_and_is_written_as_it_is(root) -> None:
    path = root / "docs" / "figures" / "selection.json"
    found = from_json(PoolReplayed, read_text(path, "record"), "record")
    committed, written = (json.loads(text) for text in (path.read_text(encoding="utf-8"), to_json(found)))
    assert contains(written, committed)


def contains(whole: object, part: object) -> bool:
    """Return whether `whole` is `part` but for fields that were added to records later."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(name in whole and contains(whole[name], value) for name, value in part.items())
    if isinstance(part, list) and isinstance(whole, list):
        return len(whole) == len(part) and all(map(contains, whole, part))
    return whole == part
