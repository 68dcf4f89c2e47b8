#!/usr/bin/env python
"""Drain the verifier of this container before the container ends.

outrider-drain-here --coordinator HOST:PORT …

The verifier is the one at this machine's address or $POD_IP; all options go to `outrider status` and `outrider drain`.
Without a verifier here the exit status is 0 too.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys


def main() -> int:
    """Find the verifier and drain it; return the exit status of `outrider drain`."""
    options = sys.argv[1:]
    here = {os.environ.get("POD_IP") or socket.gethostbyname(socket.gethostname()), socket.gethostname()}
    status = subprocess.run(["outrider", "status", "--json", *options], capture_output=True, text=True, check=False)  # noqa: S603, S607 - our own command
    if status.returncode:
        print(f"outrider-drain-here: {status.stderr.strip()}", file=sys.stderr)  # noqa: T201 - a command
        return status.returncode
    verifiers = json.loads(status.stdout)["verifiers"]
    names = [v["name"] for v in verifiers if v["address"].rpartition(":")[0].strip("[]") in here]
    drained = [subprocess.run(["outrider", "drain", name, *options], check=False).returncode for name in names]  # noqa: S603, S607
    return max(drained, default=0)


if __name__ == "__main__":
    sys.exit(main())
