"""The process of `python -m research`."""

from __future__ import annotations

from outrider.deploy.__main__ import main
from research.commands import RESEARCH

if __name__ == "__main__":
    main(RESEARCH)
