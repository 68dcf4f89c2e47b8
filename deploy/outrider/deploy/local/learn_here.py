"""Learning of an edge from its own texts, which leave neither its machine nor, unless a folder is given, its memory.

Texts wait here, few megabytes of them, until the trainer takes them; versions that proved better on later texts of this
edge come back. The trainer is another process of this module, so whatever happens to it, texts go on as they were.
"""

from __future__ import annotations

import asyncio
import base64
import fcntl
import importlib.util
import logging
import shutil
import signal
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.cloud.learning.lesson_record import record_of_text
from outrider.cloud.learning.trainer_settings import OWN, TrainerSettings
from outrider.deploy.process.child import Child, answer_requests
from outrider.deploy.process.termination import temporary_folder
from outrider.drafters.packages import DrafterPackage
from outrider.edge.client import Client, OwnText
from outrider.proto.errors import ConfigError, InvalidArgument, OutriderError, Unavailable
from outrider.proto.plumbing.extras import lacking
from outrider.proto.salts import salted

if TYPE_CHECKING:
    from outrider.cloud.learning.trainer_actor import TrainerActor

NEEDED = ("torch", "transformers", "onnx", "safetensors")
LOOK_EVERY_S = 2.0
AGAIN_S = 60.0  # after the trainer failed
MAX_WAITING_BYTES = 4 << 20
MAX_PUSH_BYTES = 1 << 20

log = logging.getLogger(__name__)


def check_packages() -> None:
    """Raise ConfigError unless what training needs is installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(lacking("edge,cloud", *missing), field="learn_here")


class _TrainerProcess(Child):
    """A trainer of one drafter, in a process of its own."""

    def __init__(self, begin: Mapping[str, Any]) -> None:
        super().__init__("outrider.deploy.local.learn_here", "the trainer of this edge")
        self._begin = begin
        self.info: dict[str, Any] = {}

    async def prepare(self) -> None:
        self.info = await self.ask(self._begin)

    async def learn(self, records: list[bytes]) -> None:
        self.info = await self.ask({"do": "learn", "records": [base64.b64encode(each).decode() for each in records]})


class LearningHere:
    """Learning beside one client; `run` it in a task, with the client open.

    Training may take `cpu_share` of one core. Without a `folder`, what is learned is forgotten when `run` ends.
    """

    def __init__(self, client: Client, *, cpu_share: float, folder: Path | None, logs: Mapping[str, str]) -> None:
        self._client = client
        self._cpu_share = cpu_share
        self._folder = folder.expanduser() if folder is not None else None
        self._logs = {"log_level": "", "log_format": "text"} | dict(logs)
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self.dropped = 0
        """Number of texts that were dropped since the trainer was behind."""
        self.info: dict[str, Any] = {}
        """Values that the trainer has said last."""
        client.trainer = self.take

    def take(self, text: OwnText) -> None:
        """Let a text wait for the trainer; the oldest give way where too many wait."""
        parent = self._client.learnable
        if parent is None:
            return
        try:
            encoded = record_of_text(
                text.tokens,
                text.first_generated,
                text.sampling,
                model=parent.target,
                tokenizer_sha256=parent.tokenizer_sha256,
                session_salt=salted(b"", text.session),
                key_salt=salted(b"", "here"),
                prompt_class=text.prompt_class,
                at_s=time.time(),
            ).encode()
        except InvalidArgument as error:
            log.debug("nothing is learned from a text: %s", error)
            return
        self._waiting.append(encoded)
        self._waiting_bytes += len(encoded)
        while self._waiting_bytes > MAX_WAITING_BYTES:
            self._pop()
            self.dropped += 1

    async def run(self) -> None:
        """Learn for ever; a trainer that fails is started again after a while."""
        with ExitStack() as stack:
            folder = self._folder
            if folder is None:
                folder = stack.enter_context(temporary_folder("outrider-learn-here-"))
            while True:
                while (parent := self._client.learnable) is None:  # noqa: ASYNC110 - nothing tells when it is there
                    await asyncio.sleep(LOOK_EVERY_S)
                try:
                    await self._learn_from(parent, folder)
                except (OutriderError, OSError) as error:
                    log.warning("learning here pauses for %g s: %s", AGAIN_S, error)
                    await asyncio.sleep(AGAIN_S)

    async def _learn_from(self, parent: DrafterPackage, folder: Path) -> None:
        """Train a drafter until another version takes its place."""
        begin = {
            "do": "begin",
            "drafter": str(parent.folder),
            "folder": str(folder),
            "forget": self._folder is None,
            "cpu_share": self._cpu_share,
            **self._logs,
        }
        drafts_with = parent.version
        async with _TrainerProcess(begin) as process:
            log.info("training %s@%s from this edge's texts", parent.name, parent.version)
            while (now := self._client.learnable) is not None and now.version == parent.version:
                self.info = process.info
                if process.info["version"] != drafts_with:
                    drafts_with = process.info["version"]
                    await self._client.draft_with(Path(process.info["folder"]))
                    if drafts_with == parent.version:
                        log.warning("drafting without what was trained here, which hit less")
                    else:
                        log.info("drafting with version %s that was trained here", drafts_with)
                await asyncio.sleep(LOOK_EVERY_S)
                await process.learn(self._next())

    def _next(self) -> list[bytes]:
        records: list[bytes] = []
        while self._waiting and sum(map(len, records)) < MAX_PUSH_BYTES:
            records.append(self._pop())
        return records

    def _pop(self) -> bytes:
        oldest = self._waiting.popleft()
        self._waiting_bytes -= len(oldest)
        return oldest


class HereTrainer:
    """The trainer's process: answers `begin` once, then `learn` with encoded records, and learns in a thread.

    It ends with its standard input. A failure of learning ends it; the edge starts another.
    """

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
        from outrider.cloud.learning.trainer_actor import TrainerActor  # imports torch, which the edge does without

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
        settings = TrainerSettings(drafter=request["drafter"], folder=folder, cpu_share=request["cpu_share"], **OWN)
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
