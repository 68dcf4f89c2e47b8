"""State that cannot be cut back: short convolutions, linear attention and state spaces beside the paged KV cache.

Such a layer is a function along the rows of a text that leaves a state behind. transformers gives these functions the
same names in all families, so each is replaced, layer by layer, by one that calls it for each session's own rows, those
of several sessions as texts of one call.

A session keeps, for each function, the state at a *border*, a multiple of 16 positions, and the arguments of the rows
after it. A step runs from there over those rows and its own: to cut back is to drop rows, and a branch is other rows
after the same state. The border moves only over tokens that are in the transcript for good. The arguments are small,
and the products with the layer's weights that made them are not computed again.

Functions that work in chunks are called for 16 rows at the same positions however a text is cut into steps, so a row
keeps its bits as far as the kernels allow it (`Target.keeps_bits` tries).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.nn import functional

from outrider.cloud.target.attention import RowSpan, joined
from outrider.cloud.target.kv_cache import BranchCache
from outrider.cloud.target.session_states import BORDER, Key, RowArguments

_Rows = tuple[RowArguments, torch.Tensor | None]  # rows, and the state before them; None: nothing was before
_Run = tuple[torch.Tensor, torch.Tensor]  # results of rows, and the state after them
_Job = Generator[_Rows, _Run, list[torch.Tensor]]  # asks for runs one after the other, and returns results

_VECTOR = 16  # numbers of 32 bits that a core works on at once

_spans: ContextVar[Sequence[RowSpan]] = ContextVar("spans of the pass", default=())


@contextmanager
def rows_of(spans: Sequence[RowSpan]) -> Iterator[None]:
    """Let functions of attached models take their rows for those of `spans`; outside they are the model's own."""
    token = _spans.set(spans)
    try:
        yield
    finally:
        _spans.reset(token)


def attach(model: Any) -> int:
    """Have each layer of `model` that keeps a state run by session; return the number of such layers."""
    attached = 0
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        names = set(getattr(getattr(forward, "__code__", None), "co_names", ()))
        functions = [function for function in _FUNCTIONS if function.name in names]
        if not functions:
            continue
        known = forward.__globals__
        ours = {
            each.name: partial(
                _by_session, each, known, (attached, i), tuple(inspect.signature(known[each.name]).parameters)
            )
            for i, each in enumerate(functions)
        }
        code, defaults = forward.__code__, forward.__defaults__
        replaced = FunctionType(code, known | ours, forward.__name__, defaults, forward.__closure__)
        replaced.__kwdefaults__ = forward.__kwdefaults__
        module.forward = MethodType(replaced, module)
        attached += 1
    return attached


class _RowFunction(ABC):
    """A function along rows, called for a chunk of several texts at a time.

    Attributes:
        name: its name in the modules of transformers.
        rows: its arguments that have a part for each row, and their dimension along the rows.
        along: dimension of its results along the rows.
        returns_state: whether it returns a state, or None, beside the results even if none is asked for.
        whole: whether each call has `BORDER` rows of a text, those missing filled up with zeros.
    """

    returns_state = False
    whole = True

    def __init__(self, name: str, rows: Sequence[str], along: int) -> None:
        self.name = name
        self.rows = dict.fromkeys(rows, along)
        self.along = along

    @abstractmethod
    def chunk(self, known: Mapping[str, Any], given: dict[str, Any], state: torch.Tensor | None) -> _Run:
        """Run a chunk [texts, ...] after `state`, with the family's functions `known` and all arguments.

        What it leaves behind after rows that were filled up, nobody looks at.
        """

    def run(self, known: Mapping[str, Any], given: Mapping[str, Any], asked: Sequence[_Rows]) -> list[_Run]:
        """Run the rows of several texts, chunk by chunk, those that begin a text apart from the others.

        All run apart where a row is no whole vectors: small kernels round by how many texts they have.
        """
        cut = [[rows.part(at, min(at + BORDER, len(rows))) for at in range(0, len(rows), BORDER)] for rows, _ in asked]
        results: list[list[torch.Tensor]] = [[] for _ in asked]
        states = [state for _, state in asked]
        shared = _whole_vectors(asked[0][0])
        for i in range(max(map(len, cut))):
            calls: dict[int, list[int]] = {}
            for number, chunks in enumerate(cut):
                if i < len(chunks):
                    calls.setdefault(int(states[number] is None) if shared else number, []).append(number)
            for some in calls.values():
                chunks = [cut[number][i] for number in some]
                size = BORDER if self.whole else max(map(len, chunks))
                rows = {name: joined([_filled(chunk, name, size) for chunk in chunks]) for name in self.rows}
                before = [state for number in some if (state := states[number]) is not None]
                result, after = self.chunk(known, {**given, **rows}, joined(before) if before else None)
                for number, chunk, own, state in zip(some, chunks, result.split(1), after.split(1), strict=True):
                    results[number].append(own.narrow(self.along, 0, len(chunk)))
                    states[number] = state
        whole = [joined(parts, dim=self.along) for parts in results]
        return [(each, state) for each, state in zip(whole, states, strict=True) if state is not None]


class _Convolution(_RowFunction):
    """A causal convolution: all that a layer of LFM2 is, and the beginning of others; its state is what it saw last."""

    def chunk(self, known: Mapping[str, Any], given: dict[str, Any], state: torch.Tensor | None) -> _Run:
        columns, seen = given.pop("hidden_states"), given["weight"].shape[-1] - 1
        state = columns.new_zeros(*columns.shape[:2], seen) if state is None else state
        columns = torch.cat([state, columns], dim=2)
        return known[self.name](columns, **given)[..., seen : columns.shape[2]], columns[..., -seen:]


class _Chunked(_RowFunction):
    """A function that works in chunks.

    Args:
        initial: its argument for the state before.
        final: its argument that asks for the state after.
    """

    def __init__(self, name: str, rows: Sequence[str], initial: str, final: str, *, returns_state: bool) -> None:
        super().__init__(name, rows, along=1)
        self.returns_state = returns_state
        self._initial, self._final = initial, final

    def chunk(self, known: Mapping[str, Any], given: dict[str, Any], state: torch.Tensor | None) -> _Run:
        asked = {self._initial: state, self._final: True, "chunk_size": BORDER}
        result, state = known[self.name](**given | asked)
        if state is None:
            raise ValueError(f"{self.name} returns no state")
        return result, state


class _Mamba(_RowFunction):
    """Mamba (Gu and Dao 2023), row by row: the family's function for many rows takes no state."""

    whole = False
    _NAMES = (("A", "A"), ("D", "D"), ("dt_bias", "delta_bias"), ("dt_softplus", "delta_softplus"))

    def chunk(self, known: Mapping[str, Any], given: dict[str, Any], state: torch.Tensor | None) -> _Run:
        rows = [given[name].movedim(2, 0).contiguous() for name in self.rows]
        fixed = {name: given[other] for name, other in self._NAMES}
        size = *given["hidden_states"].shape[:2], given["A"].shape[-1]
        state = given["A"].new_zeros(size, dtype=torch.float32) if state is None else state.clone()
        step = known["mamba_selective_state_update"]
        results = [step(state, **dict(zip(self.rows, row, strict=True)), **fixed) for row in zip(*rows, strict=True)]
        return torch.stack(results, dim=2), state


_DELTA = ("query", "key", "value", "g", "beta"), "initial_state", "output_final_state"
_STATE_SPACE = ("hidden_states", "dt", "B", "C"), "initial_states", "return_final_states"
_FUNCTIONS: Sequence[_RowFunction] = (
    _Convolution("causal_conv1d_fn", ("hidden_states",), along=2),
    _Chunked("torch_chunk_gated_delta_rule", *_DELTA, returns_state=True),  # Gated DeltaNet (Yang et al. 2025)
    _Chunked("chunk_kimi_delta_attention", *_DELTA, returns_state=True),
    _Chunked("mamba2_chunk_scan", *_STATE_SPACE, returns_state=False),  # Mamba 2 (Dao and Gu 2024)
    _Mamba("mamba_selective_scan", ("hidden_states", "dt", "B", "C", "z"), along=2),
)


def _whole_vectors(rows: RowArguments) -> bool:
    shapes = ((list(each.shape), rows.dimensions[name]) for name, each in rows.arguments.items())
    return all((shape[:along] + shape[along + 1 :])[-1] % _VECTOR == 0 for shape, along in shapes)


def _filled(chunk: RowArguments, name: str, size: int) -> torch.Tensor:
    """Return an argument with rows of zeros up to `size`; nobody looks at what they do to a state."""
    rows, along = chunk.arguments[name], chunk.dimensions[name]
    missing = [0, 0] * (rows.dim() - 1 - along) + [0, size - len(chunk)]
    return functional.pad(rows, missing) if missing[-1] else rows.contiguous()


def _by_session(
    function: _RowFunction, known: Mapping[str, Any], key: Key, names: Sequence[str], *args: Any, **kwargs: Any
) -> Any:
    """Run `function`: as it is outside of `rows_of`, else over the rows of each span, after their own state.

    `names` are those of its parameters.
    """
    spans, own = _spans.get(), known[function.name]
    if not spans:
        return own(*args, **kwargs)
    given = dict(zip(names, args, strict=False)) | kwargs
    rows = RowArguments({name: given.pop(name) for name in function.rows}, function.rows)
    run = partial(function.run, known, given)
    found: dict[RowSpan, list[torch.Tensor]] = {}
    for job, of_branches in ((_of_session, False), (_of_branch, True)):  # branches go on from their sessions' rows
        some = [span for span in spans if isinstance(span.cache, BranchCache) == of_branches]
        new = {span: rows.part(span.first, span.first + span.count) for span in some}
        found |= _together(run, {span: job(key, span, new[span]) for span in some})
    results = []
    for span in spans:
        whole = joined(found[span], dim=function.along)
        results.append(whole.narrow(function.along, whole.shape[function.along] - span.count, span.count))
    if missing := len(rows) - spans[-1].first - spans[-1].count:  # rows that only fill up the pass
        shape = list(results[0].shape)
        shape[function.along] = missing
        results.append(results[0].new_zeros(shape))
    together = joined(results, dim=function.along)
    return (together, None) if function.returns_state else together


def _together(
    run: Callable[[Sequence[_Rows]], list[_Run]], jobs: dict[RowSpan, _Job]
) -> dict[RowSpan, list[torch.Tensor]]:
    """Return the results of `jobs`, whose runs share calls."""
    results = {}
    asked = {span: next(job) for span, job in jobs.items()}
    while asked:
        runs = dict(zip(asked, run(list(asked.values())), strict=True))
        asked = {}
        for span, done in runs.items():
            try:
                asked[span] = jobs[span].send(done)
            except StopIteration as ended:
                results[span] = ended.value
    return results


def _of_session(key: Key, span: RowSpan, new: RowArguments) -> _Job:
    """Return the results of rows that end with the `new` ones, and move the border where they are certain."""
    states = span.cache.states
    tail = states.tail(key, new.part(0, 0))
    rows = tail.before(span.start).followed_by(new)
    certain = min(span.context, states.certain)
    results = []
    for border in (*sorted(states.wanted), certain - certain % BORDER):
        if tail.border < border <= certain:
            length = border - tail.border
            result, left = yield rows.part(0, length), tail.state
            state = left.clone()  # no view of what other texts left behind
            results.append(result)
            rows = rows.part(length, len(rows))
            tail.move(border, state)
            if border in states.wanted:
                states.kept.setdefault(border, {})[key] = state
    if len(rows):
        result, _ = yield rows, tail.state
        results.append(result)
    tail.rows = rows.copied() if tail.border > span.start else rows  # no view of a long prompt's
    return results


def _of_branch(key: Key, span: RowSpan, new: RowArguments) -> _Job:
    """Return the results of rows that end with the `new` ones, after the session's up to where the branch leaves it."""
    branch: Any = span.cache
    session, own = branch.session.states.tails[key], branch.states.tail(key, new.part(0, 0))
    own.rows = own.rows.part(0, span.start - branch.base).followed_by(new)
    result, _ = yield session.before(branch.base).followed_by(own.rows), session.state
    return [result]
