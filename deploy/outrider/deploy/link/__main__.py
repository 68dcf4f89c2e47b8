"""`python -m outrider.deploy.link`: the process that `LinkProcess` starts."""

from __future__ import annotations

import signal
import sys

from outrider.deploy.link import punctual
from outrider.deploy.link.control import obey

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, and its end is ours
    sys.exit(punctual.run(obey()))
