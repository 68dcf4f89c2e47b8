"""Decoding of prompts over an emulated link, with observations."""

from __future__ import annotations

import time
from dataclasses import dataclass

from outrider.deploy.prompts import Prompt
from outrider.edge import Client, Sampling, Tokens
from outrider.edge.decoding import Observer
from outrider.proto.session import EdgeStatistics
from outrider.proto.types import CloudFrame, Commit, Draft, EdgeFrame


@dataclass(frozen=True, slots=True)
class Measured:
    """One decoded text.

    Attributes:
        prompt: its prompt.
        tokens: [n] its tokens.
        began: time of the request, monotonic seconds.
        arrivals: [n] time when each token reached the user, same clock.
        statistics: counts of the edge's session.
        observer: what the session did and when.
    """

    prompt: Prompt
    tokens: tuple[int, ...]
    began: float
    arrivals: tuple[float, ...]
    statistics: EdgeStatistics
    observer: TextObserver

    @property
    def seconds(self) -> float:
        """Seconds from the request to the last token."""
        return self.arrivals[-1] - self.began

    @property
    def first_token_s(self) -> float:
        """Seconds from the request to the first token."""
        return self.arrivals[0] - self.began


class TextObserver(Observer):
    """Recorder of drafting jobs (began, ended, tokens), drafts (frame, at) and commits (frame, at)."""

    def __init__(self) -> None:
        self.jobs: list[tuple[float, float, int]] = []
        self.drafts: list[tuple[Draft, float]] = []
        self.commits: list[tuple[Commit, float]] = []

    def drafted(self, began: float, ended: float, tokens: int) -> None:
        """Keep a drafting job."""
        self.jobs.append((began, ended, tokens))

    def sent(self, frame: EdgeFrame, at: float) -> None:
        """Keep drafts."""
        if isinstance(frame, Draft):
            self.drafts.append((frame, at))

    def received(self, frame: CloudFrame, at: float) -> None:
        """Keep commits."""
        if isinstance(frame, Commit):
            self.commits.append((frame, at))


async def measure_text(client: Client, prompt: Prompt, sampling: Sampling) -> Measured:
    """Decode one prompt, and return what was observed."""
    tokens: list[int] = []
    arrivals: list[float] = []
    observer = TextObserver()
    began = time.monotonic()
    async for event in client.generate(prompt.text, sampling, observer=observer):
        if isinstance(event, Tokens):
            tokens += event.ids
            arrivals += [time.monotonic()] * len(event.tokens)
        else:
            return Measured(prompt, tuple(tokens), began, tuple(arrivals), event.statistics, observer)
    raise AssertionError("generate ends with Finished or an error")
