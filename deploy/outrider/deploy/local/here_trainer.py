"""The trainer of `outrider edge --learn-here`, a process of its own that is fed over a pipe; see `learn_here`.

It learns in a thread, and ends with its standard input. A failure of learning ends it; the edge starts another.
"""

from __future__ import annotations

import asyncio
import base64
import fcntl
import shutil
import signal
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from outrider.cloud.learning.trainer_actor import TrainerActor
from outrider.cloud.learning.trainer_settings import OWN, TrainerSettings
from outrider.deploy.process.child import answer_requests
from outrider.proto.errors import ConfigError, InvalidArgument, Unavailable


class HereTrainer:
    """Answers requests: `begin` once, then `learn` with encoded records."""

    def __init__(self) -> None:
        self._actor: TrainerActor | None = None
        self._stack = ExitStack()

    async def answer(self, request: dict[str, Any]) -> Any:
        match request["do"]:
            case "begin":
                return await asyncio.to_thread(self._begin, request)
            case "learn":
                return await asyncio.to_thread(self._learn, request["records"])
            case other:
                raise InvalidArgument(f"{other!r} is no request", field="do")

    def close(self) -> None:
        """Leave a checkpoint, and no folder that was to be forgotten."""
        if self._actor is not None:
            self._actor.stop()
        self._stack.close()

    def _begin(self, request: dict[str, Any]) -> dict[str, Any]:
        folder = Path(request["folder"])
        if request["forget"]:
            self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = self._stack.enter_context((folder / ".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{folder} is another edge's; give each its own", field="learn_here_folder") from error
        except OSError as error:
            raise ConfigError(f"cannot write to {folder}: {error.strerror}", field="learn_here_folder") from error
        settings = TrainerSettings(
            drafter=request["drafter"],
            folder=folder,
            cpu_share=request["cpu_share"],
            **OWN,
        )
        self._actor = TrainerActor(settings, request["log_level"], request["log_format"])
        return self._actor.info()

    def _learn(self, records: list[str]) -> dict[str, Any]:
        if self._actor is None:
            raise InvalidArgument("comes before begin", field="do")
        with suppress(Unavailable):  # it is behind, and these are left out
            self._actor.push(tuple([base64.b64decode(record) for record in records]))
        return self._actor.info()


async def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal, and the edge's: it closes standard input
    trainer = HereTrainer()
    try:
        await answer_requests(trainer.answer)
    finally:
        trainer.close()


if __name__ == "__main__":
    asyncio.run(_main())
