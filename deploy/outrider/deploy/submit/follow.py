"""What a person sees of a job: its log as it comes, and a bar of what its own progress lines say."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, aclosing
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from outrider.deploy.submit.job_server import Job, JobServer
from outrider.proto.errors import Unavailable

ATTEMPTS = 5
RETRY_S = 1.0
END_POLL_S = 0.3
# The lines of `outrider.cloud.training.report.LineReporter`: a stage, its share, its figures.
PROGRESS_LINE = re.compile(r"^(?P<stage>[a-z][\w ,.:=/-]{0,60}?) (?P<percent>\d{1,3}(?:\.\d+)?)% ?(?P<figures>.*)$")


class Screen(Protocol):
    """Where the lines of a log go."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def line(self, text: str) -> None:
        """One line of the log."""


class PlainScreen:
    """Lines as they are, for files and pipes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def line(self, text: str) -> None:
        """One line of the log."""
        print(text, flush=True)


class LiveScreen:
    """Lines above a bar that shows the job's name, its stage, how far that is, and for how long this watches."""

    def __init__(self, console: Console, job_id: str) -> None:
        self._progress = Progress(
            TextColumn("[bold]{task.fields[job]}"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("waiting", total=None, job=job_id)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def line(self, text: str) -> None:
        """A progress line moves the bar; any other is printed above it."""
        if found := PROGRESS_LINE.match(text):
            percent = min(100.0, float(found["percent"]))
            self._progress.update(self._task, description=found["stage"], total=100.0, completed=percent)
        else:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)


def screen_for(console: Console, job_id: str) -> Screen:
    """A bar where a person watches, plain lines elsewhere."""
    return LiveScreen(console, job_id) if console.is_terminal else PlainScreen()


def downloads(console: Console) -> Progress:
    """A bar of bytes; shows nothing where no person watches."""
    columns = (TextColumn("fetching"), BarColumn(bar_width=24), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)


async def follow(server: JobServer, job_id: str, screen: AbstractContextManager[Screen]) -> Job:
    """Show the log from its beginning until the job has ended; the job then.

    Raises:
        Unavailable: the server stays away.
    """
    with screen as shown:
        async with aclosing(_lines(server, job_id)) as lines:
            async for line in lines:
                shown.line(line)
    return await asyncio.to_thread(server.job, job_id)


async def _lines(server: JobServer, job_id: str) -> AsyncGenerator[str]:
    """The log's lines, each once; a broken stream is taken up again, which begins at the log's beginning."""
    seen = 0
    begun = ""
    failures = 0
    while True:
        at = 0
        try:
            async for piece in server.log(job_id):
                failures = 0
                *whole, begun = (begun + piece[max(0, seen - at) :]).split("\n")
                at += len(piece)
                seen = max(seen, at)
                for line in whole:
                    yield line
        except Unavailable:
            failures += 1
            if failures >= ATTEMPTS:
                raise
        # The log ends a moment before the job's state says so.
        if await _has_ended(server, job_id):
            break
        await asyncio.sleep(RETRY_S)
    if begun:
        yield begun


async def _has_ended(server: JobServer, job_id: str) -> bool:
    for _ in range(10):
        if (await asyncio.to_thread(server.job, job_id)).ended:
            return True
        await asyncio.sleep(END_POLL_S)
    return False
