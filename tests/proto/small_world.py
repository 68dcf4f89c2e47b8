"""A world small enough to try everything that can happen in it: one edge, two verifiers, two drafters, four tokens.

What ships runs in it: both session machines, and a verifier's slots, pages, admission, masks and runner. What is left
to chance or to policy elsewhere is an action or a choice of whoever explores it: the order of frames, what drafters
propose, when a step begins, which stream breaks, how much time passes.

A part of the world (the edge, a verifier) is a function of its own state and of what comes to it, so a state of the
world is the numbers of its parts' states and of the frames under way, and no part does anything twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from small_edge import LEAVE, SmallEdge
from small_rules import CHOICES, Action, Rules, Violation
from small_states import Interned, clone
from small_verifier import SmallVerifier

from outrider.proto.errors import OutriderError
from outrider.proto.types import Branches, Commit, Draft, Goaway, Opened, token_ids

NAMES = "vw"
FAULTS = Rules.FAULTS


class Stream(NamedTuple):
    """A stream, and the numbers of what is on its way in it.

    Attributes:
        key: its number.
        verifier: the one at its other end.
        up: frames to it.
        down: frames from it; an error ends the stream.
        left: whether its edge has left it, which its verifier has yet to notice.
    """

    key: int
    verifier: int
    up: tuple[int, ...] = ()
    down: tuple[int, ...] = ()
    left: bool = False


class State(NamedTuple):
    """A state of the world.

    Attributes:
        edge: number of the edge's.
        verifiers: numbers of theirs.
        streams: streams that either end still holds, oldest first.
        opened: streams opened so far.
        left: how often each fault may still happen.
    """

    edge: int
    verifiers: tuple[int, ...]
    streams: tuple[Stream, ...]
    opened: int
    left: tuple[int, ...]


class Reaction(NamedTuple):
    """Outcome of an event: choices made, the next state and what was said, or a violation."""

    choices: tuple[tuple[int, int], ...]
    after: int
    said: tuple[Any, ...]
    violation: Violation | None = None


class Parts:
    """The states of one part that are known, and what came of events."""

    def __init__(self, frames: Interned) -> None:
        self.states = Interned()
        self._frames = frames
        self._known: dict[tuple[int, Action], list[Reaction]] = {}
        self._options: dict[int, Any] = {}

    def options(self, number: int) -> Any:
        """Return what a part's state says can happen."""
        known = self._options.get(number)
        if known is None:
            known = self._options[number] = self.states[number].options()
        return known

    def happen(self, number: int, event: Action) -> tuple[int, tuple[Any, ...]]:
        """Let an event come to a part; return its next state, and what it says."""
        known = self._known.setdefault((number, event), [])
        found = next((each for each in known if CHOICES.repeat(each.choices)), None)
        if found is None:
            found = self._react(number, event)
            known.append(found)
        if found.violation is not None:
            raise found.violation
        return found.after, found.said

    def _react(self, number: int, event: Action) -> Reaction:
        place, part = len(CHOICES.options), clone(self.states[number], {})
        violation: Violation | None = None
        try:
            said = part.happen(event, self._frames)
            return Reaction(CHOICES.since(place), self.states.number(part), said)
        except Violation as known:
            violation = known
        except Exception as error:  # whatever breaks, breaks the world
            violation = Violation(f"{event} raises {error!r}")
            violation.__cause__ = error
        return Reaction(CHOICES.since(place), number, (), violation)


class World:
    """The rules of a world; its states are values."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.frames = Interned()
        self.edges = Parts(self.frames)
        self.verifiers = Parts(self.frames)

    def first(self) -> State:
        """Return the state in which everything begins."""
        CHOICES.begin(())
        verifiers = tuple(
            self.verifiers.states.number(SmallVerifier(self.rules, name)) for name in NAMES[: self.rules.verifiers]
        )
        edge = self.edges.states.number(SmallEdge(self.rules))
        return State(edge, verifiers, (), 0, tuple(getattr(self.rules, fault) for fault in FAULTS))

    def edge(self, state: State) -> SmallEdge:
        """Return the edge in a state, to look at."""
        edge: SmallEdge = self.edges.states[state.edge]
        return edge

    def verifier(self, state: State, number: int) -> SmallVerifier:
        """Return a verifier in a state, to look at."""
        verifier: SmallVerifier = self.verifiers.states[state.verifiers[number]]
        return verifier

    # --- what can happen ---

    def progress(self, state: State) -> Iterator[Action]:
        """Yield what happens by itself, sooner or later; the first of it leads to the end."""
        yield from (("edge", event) for event in self.edges.options(state.edge)[0])
        edge = self.edge(state)
        if edge.reopens and edge.done is None:
            yield from (("open", number) for number in range(self.rules.verifiers))
        yield from (("up", stream.key) for stream in state.streams if stream.up)
        for number, verifier in enumerate(state.verifiers):
            yield from (("at", number, event) for event in self.verifiers.options(verifier)[0])
        yield from (("down", stream.key) for stream in state.streams if stream.down)
        yield from (("gone", stream.key) for stream in state.streams if stream.left)

    def faults(self, state: State) -> Iterator[Action]:
        """Yield what may happen besides."""
        left = dict(zip(FAULTS, state.left, strict=True))
        if left["losses"] and any(not stream.left for stream in state.streams):
            yield ("lose",)
        for number, verifier in enumerate(state.verifiers):
            for event in self.verifiers.options(verifier)[1]:
                if event[0] != "drains" or left["drains"]:
                    yield "at", number, event
            if left["deaths"] and any(stream.verifier == number for stream in state.streams):
                yield "dies", number
        for event in self.edges.options(state.edge)[1]:
            if left["jumps" if event[0] == "minute" else "stops"]:
                yield "edge", event
        for stream in state.streams:
            first = self.frames[stream.up[0]] if stream.up else None
            if isinstance(first, Draft | Branches):
                if left["doubles"]:
                    yield "doubled up", stream.key
                if left["swaps"] and len(stream.up) > 1:
                    yield "swap", stream.key
            if left["doubles"] and stream.down and isinstance(self.frames[stream.down[0]], Commit | Opened):
                yield "doubled down", stream.key

    # --- it happens ---

    def after(self, state: State, action: Action, script: tuple[int, ...] = ()) -> State:
        """Return the state after something has happened.

        Raises:
            Violation: it must not have ended so.
        """
        CHOICES.begin(script)
        state = self._act(state, action)
        while self.rules.quick and (sent := [stream for stream in state.streams if stream.up]):
            state = self._act(state, ("up", sent[0].key))
        self._check_chains(state)
        return state

    def _act(self, state: State, action: Action) -> State:
        kind, *about = action
        match kind:
            case "edge":
                (event,) = about
                if event[0] in ("minute", "stop"):
                    state = spend(state, "jumps" if event[0] == "minute" else "stops")
                return self._edge(state, event)
            case "at":
                number, event = about
                if event[0] == "drains":
                    state = spend(state, "drains")
                return self._verifier(state, number, event)
            case "open":
                (number,) = about
                stream = Stream(state.opened, number)
                state = state._replace(streams=(*state.streams, stream), opened=state.opened + 1)
                return self._edge(state, ("open", NAMES[number]))
            case "lose":
                stream = next(stream for stream in state.streams if not stream.left)
                return self._edge(self._close(spend(state, "losses"), stream), ("broken",))
            case "dies":
                return self._dies(spend(state, "deaths"), about[0])
        stream = next(stream for stream in state.streams if stream.key == about[0])
        match kind:
            case "up":
                state = put(state, stream._replace(up=stream.up[1:]))
                return self._verifier(state, stream.verifier, ("frame", stream.key, stream.up[0]))
            case "down":
                return self._down(put(state, stream._replace(down=stream.down[1:])), stream)
            case "gone":
                return self._gone(state, stream)
            case "doubled up":
                return put(spend(state, "doubles"), stream._replace(up=(stream.up[0], *stream.up)))
            case "doubled down":
                return put(spend(state, "doubles"), stream._replace(down=(stream.down[0], *stream.down)))
        assert kind == "swap"
        first, second, *rest = stream.up
        return put(spend(state, "swaps"), stream._replace(up=(second, first, *rest)))

    def _edge(self, state: State, event: Action) -> State:
        after, said = self.edges.happen(state.edge, event)
        state = state._replace(edge=after)
        for frame in said:
            stream = next((stream for stream in state.streams if not stream.left), None)
            if stream is not None:
                state = (
                    self._close(state, stream)
                    if frame == LEAVE
                    else put(state, stream._replace(up=(*stream.up, frame)))
                )
        return state

    def _verifier(self, state: State, number: int, event: Action) -> State:
        after, said = self.verifiers.happen(state.verifiers[number], event)
        verifiers = list(state.verifiers)
        verifiers[number] = after
        state = state._replace(verifiers=tuple(verifiers))
        for key, item in said:
            stream = next((stream for stream in state.streams if stream.key == key), None)
            if stream is not None:
                state = put(state, stream._replace(down=(*stream.down, item)))
        self.verifier(state, number).check(lambda tokens: self._is_text(state, tokens))
        return state

    def _down(self, state: State, stream: Stream) -> State:
        """Let the edge take the first of what comes down; of a stream that it has left it comes astray."""
        number, here = stream.down[0], next(each for each in state.streams if each.key == stream.key)
        item = self.frames[number]
        if stream.left:
            astray = not isinstance(item, OutriderError) and any(not each.left for each in state.streams)
            return self._edge(state, ("frame", number)) if astray else state
        if isinstance(item, OutriderError):
            return self._edge(self._close(state, here), ("lost", number))
        if isinstance(item, Goaway):
            state = self._close(state, here)
        return self._edge(state, ("frame", number))

    def _close(self, state: State, stream: Stream) -> State:
        """Leave a stream; where its verifier notices late, frames still go both ways."""
        ended = self.verifier(state, stream.verifier).has_ended(stream.key)
        if not ended and state.left[FAULTS.index("late")] and CHOICES.of(2):
            return put(spend(state, "late"), stream._replace(left=True))
        return self._gone(state, stream)

    def _gone(self, state: State, stream: Stream) -> State:
        state = state._replace(streams=tuple(each for each in state.streams if each.key != stream.key))
        return self._verifier(state, stream.verifier, ("gone", stream.key))

    def _dies(self, state: State, number: int) -> State:
        lost = [stream for stream in state.streams if stream.verifier == number]
        state = state._replace(streams=tuple(each for each in state.streams if each.verifier != number))
        state = self._verifier(state, number, ("dies",))
        return self._edge(state, ("broken",)) if any(not stream.left for stream in lost) else state

    # --- what must hold ---

    def _check_chains(self, state: State) -> None:
        """Check that both ends mean the same by the number of a chain, where nothing is under way between them."""
        stream = next((stream for stream in state.streams if not stream.left), None)
        if stream is None or stream.up or stream.down:
            return
        drafts = self.verifier(state, stream.verifier).drafts(stream.key)
        if drafts is None or not self.edge(state).edge.connected:
            return
        edge, (transcript, number, received) = self.edge(state).edge, drafts
        chain = edge._tree
        if transcript != edge.transcript or number != chain.number:
            return
        sent = token_ids(chain.drafts[: chain.sent])
        if received != sent[: len(received)] or (len(received) < len(sent) and not self.rules.swaps):
            raise Violation(f"the edge has sent {sent} in chain {number}, and the verifier has {received}")

    def _is_text(self, state: State, tokens: list[int]) -> bool:
        edge = self.edge(state).edge
        prompt = tuple(edge.transcript[: edge.prompt_length])
        return tuple(tokens) == (prompt + self.rules.text_after(prompt, len(tokens)))[: len(tokens)]

    def check_end(self, state: State) -> None:
        """Check that nothing is left where nothing more can happen.

        Raises:
            Violation: something is, or the text has not ended.
        """
        if not self.edge(state).over:
            raise Violation("nothing can happen any more, and the text has not ended")
        full = [number for number in range(self.rules.verifiers) if not self.verifier(state, number).is_empty]
        if state.streams or full:
            raise Violation(f"left at the end: {len(state.streams)} streams, and something at {full}")


def put(state: State, stream: Stream) -> State:
    """Return the state with a stream in place of that of the same number."""
    return state._replace(streams=tuple(stream if each.key == stream.key else each for each in state.streams))


def spend(state: State, fault: str) -> State:
    """Return the state in which a fault may happen once less."""
    left = list(state.left)
    left[FAULTS.index(fault)] -= 1
    return state._replace(left=tuple(left))
