"""The process of a peer: `PYTHON child.py PEER` answers requests on its standard input, one JSON text a line.

The first request loads a model and `{"steps": {...}}` chooses what to repeat; `{"turn": {"warm": n, "timed": m}}`
repeats it and answers with seconds. What a peer raises is an answer, too: a module that is missing, or a refusal.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

CLOCKS: dict[str, Callable[[], float]] = {"cpu": time.process_time, "wall": time.perf_counter}


def reason(error: Exception) -> str:
    """Return what an error says; a ValueError is a peer's own refusal."""
    return (str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")[:300]


def answer(peer: Any, request: dict[str, Any], clock: Callable[[], float]) -> dict[str, Any]:
    """Return the answer of a loaded peer to one request."""
    try:
        if (steps := request.get("steps")) is not None:
            return {"token": peer.prepare(**steps)}
        turn = request["turn"]
        for _ in range(turn["warm"]):
            peer.step()
        times = []
        for _ in range(turn["timed"]):
            began = clock()
            peer.step()
            times.append(clock() - began)
    except Exception as error:  # the one who asks must hear of it, whatever it is
        return {"refused": reason(error)}
    return {"seconds": times}


def serve(requests: TextIO, answers: TextIO, load: Callable[..., Any]) -> None:
    """Answer until there are no more requests; `load` makes the peer of the first one."""
    peer: Any = None
    clock: Callable[[], float] = time.perf_counter
    for line in requests:
        request = json.loads(line)
        if (options := request.get("load")) is not None:
            clock = CLOCKS[options.pop("clock")]
            try:
                peer = load(**options)
                reply = {"version": peer.version}
            except ModuleNotFoundError as error:
                reply = {"missing": error.name or str(error)}
            except Exception as error:  # as above
                reply = {"refused": reason(error)}
        else:
            reply = answer(peer, request, clock)
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


def main() -> None:
    """Serve the peer that the command line names, and keep what its libraries print away from the answers."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    kind = sys.argv[1]

    def load(**options: Any) -> Any:
        module = runpy.run_path(str(Path(__file__).with_name(f"{kind}_peer.py")))
        return module[f"{kind.capitalize()}Peer"](**options)

    serve(sys.stdin, answers, load)


if __name__ == "__main__":
    main()
