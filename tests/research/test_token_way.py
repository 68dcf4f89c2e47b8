"""The files of README's "Follow one token", beside those that a token really passes through."""

from __future__ import annotations

import re

from research.token_way import way

BEGINS = "edge/outrider/edge/client.py"  # entered once a text


def test_a_token_passes_through_every_file_that_readme_names(root) -> None:
    section = (root / "README.md").read_text(encoding="utf-8").split("## Follow one token")[1].split("\n## ")[0]
    named = set(re.findall(r"`([\w/]+\.py)`", section))
    assert BEGINS in named
    found = way()
    assert named - {BEGINS} <= set(found)
    assert "cloud/outrider/cloud/serving/engine_health.py" not in found, (
        "a file that answers probes is on no token's way"
    )
    assert (root / "cloud/outrider/cloud/serving/engine_health.py").is_file()
