"""Extras of this package, such as [cloud]: what of one is missing here, and how to install it.

No package index has Outrider, so the remedy is the wheel or checkout that this installation came from.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
from urllib.parse import unquote, urlparse

from outrider.proto.error_codes import coded

PACKAGE = "outrider"


def lacking(extra: str, *modules: str) -> str:
    """Return the end of an error, from `needs` on: what of an extra is not installed here, and the remedy.

    Args:
        extra: name of the extra; several have commas between.
        modules: modules that could not be imported.
    """
    missing = ", ".join(dict.fromkeys([*missing_packages(extra), *modules]))
    message = f"needs the extra [{extra}], which is not all installed here (missing: {missing}); {_remedy(extra)}"
    return coded("OUT-501", message)


def missing_packages(extra: str) -> list[str]:
    """Return the packages of an extra that are not installed, by name."""
    return [name for name in _packages(set(extra.split(","))) if not _installed(name)]


def _packages(extras: set[str]) -> list[str]:
    found: list[str] = []
    try:
        lines = importlib.metadata.requires(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:  # its files alone are here, as in a Ray job
        return []
    for line in lines:
        name = re.match(r"[\w.-]+", line)
        marker = re.search(r"""extra\s*==\s*["']([\w.-]+)["']""", line)
        if name is None or marker is None or marker[1] not in extras:
            continue
        if name[0] != PACKAGE:
            found.append(name[0])
        elif inner := re.search(r"\[([^\]]*)\]", line):
            found += _packages({each.strip() for each in inner[1].split(",")} - extras)
    return sorted(set(found))


def _installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _remedy(extra: str) -> str:
    origin = _origin()
    if origin:
        return f"pip install {shlex.quote(f'{origin}[{extra}]')}"
    return f"install the wheel or checkout that {PACKAGE} came from with it: pip install '.[{extra}]'"


def _origin() -> str:
    """Return the folder or wheel that this package was installed from, as pip notes it (PEP 610); empty: unknown."""
    try:
        noted = importlib.metadata.distribution(PACKAGE).read_text("direct_url.json")
        url = urlparse(json.loads(noted or "{}").get("url", ""))
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ""
    return unquote(url.path) if url.scheme == "file" else ""
