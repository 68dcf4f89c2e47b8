"""Cases of one client: small functions, each the proof of one feature; `run` prints a line of JSON for each.

A client's file begins with its packages, as inline metadata of Python scripts (`# dependencies = ["openai==3.54.0"]`;
in JavaScript the same behind `//`), and ends with `run("openai")`. It finds the server in BASE_URL (it ends in `/v1`),
MODEL and API_KEY, servers whose targets call functions in TOOL_URLS, and needs nothing of Outrider. A case that raises
has failed; the message becomes the table's reason.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import traceback
from collections.abc import Callable

BASE_URL = os.environ.get("BASE_URL", "http://127.0.0.1:8080/v1")
MODEL = os.environ.get("MODEL", "reference")
API_KEY = os.environ.get("API_KEY", "unused")
QUESTION = [{"role": "user", "content": "What is 2 + 3?"}]

_CASES: dict[str, Callable[[], None]] = {}


def case(feature: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Declare the proof of a feature; its name has no comma, since the table separates names by commas."""

    def declare(proof: Callable[[], None]) -> Callable[[], None]:
        _CASES[feature] = proof
        return proof

    return declare


def each_tool_url(proof: Callable[[str], None]) -> Callable[[], None]:
    """Return a proof that holds at every daemon whose target calls functions; it takes a base URL."""

    def all_of_them() -> None:
        for name, url in json.loads(os.environ["TOOL_URLS"]).items():
            try:
                proof(f"{url}/v1")
            except Exception as error:
                raise RuntimeError(f"{name}: {error!r}") from error

    return all_of_them


def run(package: str) -> None:
    """Run the cases of the client that `package` installs, or those that the command line names."""
    print(json.dumps({"version": importlib.metadata.version(package)}), flush=True)
    for feature, proof in _CASES.items():
        if sys.argv[1:] and feature not in sys.argv[1:]:
            continue
        try:
            proof()
        except Exception as error:  # whatever a client raises is its verdict
            traceback.print_exc()
            refused = isinstance(error, NotImplementedError)  # with the server's own reason
            reason = (str(error) if refused else f"{type(error).__name__}: {error}").partition("\n")[0]
            print(json.dumps({"feature": feature, "works": False, "reason": reason[:160]}), flush=True)
        else:
            print(json.dumps({"feature": feature, "works": True, "reason": ""}), flush=True)
