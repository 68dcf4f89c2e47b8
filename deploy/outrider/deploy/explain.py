"""`outrider explain`: the entry of an error's code in docs/errors.md."""

from __future__ import annotations

import re
from pathlib import Path

from outrider.deploy.arguments import Given
from outrider.deploy.commands.operating import ExplainSettings
from outrider.proto.errors import NotFound

HERE = Path(__file__)
PAGES = (HERE.with_name("errors.md"), HERE.parents[3] / "docs" / "errors.md")  # of a wheel, and of a checkout


def entries() -> dict[str, str]:
    """Return the text of each entry, by code."""
    page = next(path for path in PAGES if path.is_file()).read_text(encoding="utf-8")
    parts = re.split(r"^## (OUT-\d{3})\n", page, flags=re.MULTILINE)[1:]
    return {code: text.strip() for code, text in zip(parts[::2], parts[1::2], strict=True)}


def explain(given: Given) -> int:
    """Run `outrider explain`."""
    known, code = entries(), given(ExplainSettings).code.upper()
    if not code:
        print(*(f"{each}  {text.splitlines()[0]}" for each, text in known.items()), sep="\n")
        return 0
    if code not in known:
        raise NotFound(f"there is no {code!r}; `outrider explain` lists all", field="code")
    print(f"{code}: {known[code]}")
    return 0
