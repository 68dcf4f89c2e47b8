"""Waits until a job's command has ended, however it ended, then packs what is wanted of it and clears up.

It is a process of its own, in no family with the job: Ray kills a stopped job's processes after three seconds
(RAY_JOB_STOP_WAIT_TIME_S of the cluster), which may be too few for a checkpoint and its packing. What the command had
written by then is handed back all the same.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from outrider.deploy.submit.artefacts import pack

ORPHANED = '"$@" &'  # the shell ends at once, so nobody's children are killed with this process among them


class Packer:
    """One packer at work. Keep `alive` open, here and in the command, as long as the command runs."""

    def __init__(self, work: Path, artefacts: Path, wanted: Sequence[str]) -> None:
        ended, self.alive = os.pipe()
        self._packed, packing = os.pipe()
        call = [sys.executable, "-m", __name__, str(ended), str(packing), str(work), str(artefacts), *wanted]
        subprocess.run(  # noqa: S603 - this very module
            ["/bin/sh", "-c", ORPHANED, "sh", *call],
            check=True,
            start_new_session=True,
            pass_fds=(ended, packing),
        )
        os.close(ended)
        os.close(packing)

    def finish(self) -> None:
        """The command has ended; returns when all is packed."""
        os.close(self.alive)
        os.read(self._packed, 1)
        os.close(self._packed)


def main(arguments: Sequence[str]) -> None:
    """In the packer: the pipe that ends with the command, the one to end, where to look, where to pack, what."""
    ended, _, work, artefacts, *wanted = arguments
    os.read(int(ended), 1)
    if wanted:
        manifest = pack(Path(work), wanted, Path(artefacts))
        print(f"packed {len(manifest.files)} files, {manifest.size / 1e6:.1f} MB", flush=True)
    shutil.rmtree(work)


if __name__ == "__main__":
    main(sys.argv[1:])
