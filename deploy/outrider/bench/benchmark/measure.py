"""Decoding of prompts over an emulated link, with observations."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from outrider.deploy.built_in_prompts import Prompt
from outrider.edge import Client, Sampling, Tokens
from outrider.edge.decoding import Observer
from outrider.proto.session import EdgeStatistics
from outrider.proto.types import CloudFrame, Commit, Draft, EdgeFrame


@dataclass(eq=False)
class Measured(Observer):
    """One decoded text, and what its session did when, in seconds of the monotonic clock.

    Attributes:
        prompt: its prompt.
        began_s: time of the request.
        tokens: [n] its tokens.
        arrivals: [n] seconds from the request until each token reached the user.
        statistics: counts of the edge's session.
        jobs: drafting jobs: begin, end, and drafted tokens.
        drafts: drafts, and when they were sent.
        commits: commits, and when they came.
    """

    prompt: Prompt
    began_s: float = field(default_factory=time.monotonic)
    tokens: tuple[int, ...] = ()
    arrivals: tuple[float, ...] = ()
    statistics: EdgeStatistics = field(default_factory=EdgeStatistics)
    jobs: list[tuple[float, float, int]] = field(default_factory=list)
    drafts: list[tuple[Draft, float]] = field(default_factory=list)
    commits: list[tuple[Commit, float]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.arrivals[-1]

    def drafted(self, began: float, ended: float, tokens: int) -> None:
        self.jobs.append((began, ended, tokens))

    def sent(self, frame: EdgeFrame, at: float) -> None:
        if isinstance(frame, Draft):
            self.drafts.append((frame, at))

    def received(self, frame: CloudFrame, at: float) -> None:
        if isinstance(frame, Commit):
            self.commits.append((frame, at))


async def measure_text(client: Client, prompt: Prompt, sampling: Sampling) -> Measured:
    """Decode one prompt, and return what was observed."""
    text = Measured(prompt)
    async for event in client.generate(prompt.text, sampling, observer=text):
        if isinstance(event, Tokens):
            text.tokens += event.ids
            text.arrivals += (time.monotonic() - text.began_s,) * len(event.ids)
        else:
            text.statistics = event.statistics
    return text
