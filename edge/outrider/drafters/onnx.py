"""ONNX language model as a drafter. A session's KV cache is one numpy buffer that the graph reads and writes.

The graph's contract (the exporter's side is in `outrider.cloud.export`); p tokens are in the cache, n are new, and the
cache has room for c >= p + n:

    inputs   tokens            int64   [1, n]
             logit_rows        int64   [m]         which of the new tokens to answer for, 0 <= row < n
             candidate_count   int64   [1]         K
             last_position     int32   [1]         p + n - 1
             length            int32   []          p + n
             past_key.L        float32 [1, kv_heads, c, head_dim]      for every layer L; or int8, whose scales
             past_value.L      float32 [1, kv_heads, c, head_dim]      are the graph's
    outputs  candidate_tokens  int64   [m, K]      the K most likely next tokens, descending
             candidate_logits  float32 [m, K]
             log_normalizer    float32 [m]         log of the sum of exp over the vocabulary
             logits            float32 [m, vocabulary]
             present_key.L, present_value.L        as the past ones, which they are bound onto

Past and present are the same memory: a run writes rows p .. p + n - 1 of each layer and copies none, and no address
changes until the buffer has to grow. Rolling back sets one number; rows past the end are written over.

A steered drafter's graph has one more input for every layer, and a second, small graph gives them:

    inputs   steering.L        float32 [mlp]       added to layer L's up projection
    steering.onnx   vector float32 [rank]  ->  steering.L for every layer

They are one buffer too, which the small graph writes once for each vector; a token costs nothing more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as _onnxruntime_errors

from outrider.drafters.adapters import merged_graph
from outrider.drafters.graph_file import read_graph_file
from outrider.drafters.packages import DrafterPackage
from outrider.drafters.proposals import NO_PROPOSAL, ProposalRule
from outrider.drafters.protocol import check_scorable, check_truncation
from outrider.proto.drafter_format import SteeringShape
from outrider.proto.errors import Internal, InvalidArgument, ModelRefused, OutriderError, UnknownToken
from outrider.proto.token_counts import TokenCounts
from outrider.proto.types import DraftToken, Sampling

PREFILL_TOKENS = 64  # new tokens a run: small activations; within 4 % of the fastest size at 500 and 1,900 tokens
SCORED_TOKENS = 16  # as above where an answer is wanted for each
FIRST_CAPACITY = 256

_INPUTS = {
    "tokens": "tensor(int64)",
    "logit_rows": "tensor(int64)",
    "candidate_count": "tensor(int64)",
    "last_position": "tensor(int32)",
    "length": "tensor(int32)",
}
_OUTPUTS = {
    "candidate_tokens": "tensor(int64)",
    "candidate_logits": "tensor(float)",
    "log_normalizer": "tensor(float)",
    "logits": "tensor(float)",
}
_VECTOR, _BIAS = "vector", "steering."
_CACHES = {"float32": "tensor(float)", "int8": "tensor(int8)"}
# ONNX Runtime's exceptions have no common base of their own; binding raises the other two.
_RUNTIME_ERRORS: tuple[type[Exception], ...] = (
    *(kind for kind in vars(_onnxruntime_errors).values() if isinstance(kind, type) and issubclass(kind, Exception)),
    RuntimeError,
    ValueError,
)


@contextmanager
def _translated(refusal: type[OutriderError], doing: str) -> Iterator[None]:
    """Turn ONNX Runtime's errors into ours."""
    try:
        yield
    except OutriderError:
        raise
    except _RUNTIME_ERRORS as error:
        raise refusal(f"{doing}: {error}") from error


class OnnxDrafter:
    """A drafter package in ONNX Runtime on the CPU, shared by all sessions of the process, and tried once.

    Args:
        package: package from `load_package`, every hash checked.
        threads: threads for one step of one session.
        name: name among the drafters of an edge; empty: the package's.

    Raises:
        ModelRefused: the model does not keep the contract.
    """

    def __init__(self, package: DrafterPackage, *, threads: int = 1, name: str = "") -> None:
        self.package = package
        self.name = name or package.name
        self.version = package.version
        self.steering = package.steering
        with _translated(ModelRefused, f"drafter {package.name}"):
            graph = package.model_path if package.adapter is None else merged_graph(package)
            self.session = _load(graph, threads, package.name)
            steered = package.steering is not None
            self._steering_session = _load(package.steering_path, 1, package.name) if steered else None
        self._check_graphs()
        self._try()

    def open(self, rule: ProposalRule) -> OnnxState:
        return OnnxState(self, rule)

    def biases(self) -> _Biases | None:
        """Return new biases for one session; None: it is not steered."""
        if self._steering_session is None or self.steering is None:
            return None
        return _Biases(self._steering_session, self.steering, self.package.cache.layers)

    def _check_graphs(self) -> None:
        layers = self.package.cache.layers
        kind = _CACHES[self.package.cache.dtype]
        caches = {side: dict.fromkeys(_cache_names(side, layers), kind) for side in ("past", "present")}
        biases = dict.fromkeys(_bias_names(layers), "tensor(float)") if self.steering else {}
        inputs, outputs = self.session.get_inputs(), self.session.get_outputs()
        self._check("graph", inputs, _INPUTS | caches["past"] | biases)
        self._check("graph", outputs, _OUTPUTS | caches["present"])
        if self._steering_session is None or self.steering is None:
            return
        vectors, rows = self._steering_session.get_inputs(), self._steering_session.get_outputs()
        self._check("steering graph", vectors, {_VECTOR: "tensor(float)"})
        self._check("steering graph", rows, biases)
        for node in (*inputs, *vectors, *rows):
            if node.name == _VECTOR or node.name in biases:
                size = self.steering.rank if node.name == _VECTOR else self.steering.mlp
                if node.shape != [size]:
                    raise ModelRefused(
                        f"drafter {self.name}: {node.name} has the shape {node.shape} where its manifest says [{size}]"
                    )

    def _check(self, what: str, found: Sequence[onnxruntime.NodeArg], wanted: dict[str, str]) -> None:
        types = {node.name: node.type for node in found}
        if types != wanted:
            raise ModelRefused(f"drafter {self.name}: the {what} has {types} where the contract wants {wanted}")

    def _try(self) -> None:
        """Use every input and output once, since a graph need not declare its shapes."""
        state = self.open(ProposalRule(Sampling(temperature=1.0)))
        try:
            if self.steering is not None:
                state.steer(np.ones(self.steering.rank, dtype=np.float32), since=1)
            state.extend((0,))
            state.propose(2)  # the first token meets an empty cache, the second does not
            state.score((0,))
        except Internal as error:
            raise ModelRefused(f"drafter {self.name} does not run as its manifest says: {error.message}") from error
        finally:
            state.close()


def _load(graph: Path | bytes, threads: int, drafter: str) -> onnxruntime.InferenceSession:
    """Return a session of a graph, which is a file or the content of one."""
    if isinstance(graph, Path):
        read_graph_file(graph, drafter)  # ONNX Runtime would follow it to weights in other files
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # an edge has a battery
    options.enable_mem_pattern = False  # it would keep one pattern for every cache length ever seen
    options.log_severity_level = 3  # errors come as exceptions
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


class _Biases:
    """One session's additions to each layer's up projection, [layers, mlp] float32, all zero at first."""

    def __init__(self, session: onnxruntime.InferenceSession, shape: SteeringShape, layers: int) -> None:
        self.rows = np.zeros((layers, shape.mlp), dtype=np.float32)
        self.rank = shape.rank
        self._session = session
        self._vector = np.zeros(shape.rank, dtype=np.float32)
        self._binding = session.io_binding()
        with _translated(Internal, "binding a drafter's steering"):
            _bind_input(self._binding, _VECTOR, self._vector)
            for name, row in zip(_bias_names(layers), self.rows, strict=True):
                _bind_output(self._binding, name, row)

    def write(self, vector: np.ndarray | None) -> None:
        """Write the biases of a steering vector [rank]; None: zero."""
        if vector is None:
            self.rows.fill(0)
            return
        self._vector[:] = vector
        with _translated(Internal, "running a drafter's steering"):
            self._session.run_with_iobinding(self._binding)

    def close(self) -> None:
        self._binding.clear_binding_inputs()
        self._binding.clear_binding_outputs()


class OnnxState:
    """One session's tokens and KV cache. `_computed` of its `length` tokens are in the cache, never the last one.

    The last token is always left to the next run, because it is that run which answers what follows it.

    A steered drafter's positions before `_steered_since` (the prompt) are computed with biases of zero, later ones with
    the newest steering vector's. `_biases_stale`: the next position needs other biases than are written.

    Where answers depend on the last `_reach` tokens alone, those before them are left out: the cache is right from
    `_first_computed` on, and what lies before it, never looked at, is zeros or old. Where a prefix is cut so far that
    it would be looked at, what is needed is computed again, with the newest vector.
    """

    def __init__(self, drafter: OnnxDrafter, rule: ProposalRule) -> None:
        package, session = drafter.package, drafter.session
        self.length = 0
        self._drafter = drafter  # kept in memory, and counted by the pool, while this is
        self._biases = drafter.biases()
        self._vector: np.ndarray | None = None
        self._steered_since = 0
        self._biases_stale = False
        self._first_computed = self._computed = 0
        self._reach = package.reach or package.context_length
        self._session = session
        self._vocab_size = package.vocab_size
        self._context_length = package.context_length
        self._layers = package.cache.layers

        self._useful_candidates = package.candidates
        self._last_position = np.zeros(1, dtype=np.int32)
        self._length_after = np.zeros((), dtype=np.int32)
        self._logit_rows = np.zeros(1, dtype=np.int64)
        self._log_normalizer = np.zeros(1, dtype=np.float32)
        self._tokens = np.empty(0, dtype=np.int64)
        nothing = (self._layers, 2, 1, package.cache.kv_heads, 0, package.cache.head_dim)
        self._cache = np.empty(nothing, dtype=package.cache.dtype)
        self._binding = session.io_binding()
        with _translated(Internal, "binding a drafter's buffers"):
            _bind_input(self._binding, "logit_rows", self._logit_rows)
            _bind_output(self._binding, "log_normalizer", self._log_normalizer)
        self.follow(rule)
        self._grow(0)

    def follow(self, rule: ProposalRule) -> None:
        """Propose by `rule` from now on, with as many candidates as it wants."""
        self._choose, self._counts = rule.choose, rule.counts()
        count = rule.candidates_wanted(self._useful_candidates)
        self._candidate_count = np.array([count], dtype=np.int64)
        self._candidate_tokens = np.zeros(count, dtype=np.int64)
        self._candidate_logits = np.zeros(count, dtype=np.float32)
        with _translated(Internal, "binding a drafter's candidates"):
            _bind_input(self._binding, "candidate_count", self._candidate_count)
            _bind_output(self._binding, "candidate_tokens", self._candidate_tokens.reshape(1, count))
            _bind_output(self._binding, "candidate_logits", self._candidate_logits.reshape(1, count))

    def extend(self, tokens: Sequence[int]) -> None:
        if not len(tokens):
            return
        lowest, highest = min(tokens), max(tokens)
        if lowest < 0 or highest >= self._vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise UnknownToken(f"the drafter's vocabulary of {self._vocab_size} has no token {wrong}", field="tokens")
        end = self.length + len(tokens)
        if end > len(self._tokens):
            self._grow(end)
        self._tokens[self.length : end] = tokens
        self.length = end

    def propose(self, n: int) -> tuple[DraftToken, ...]:
        """Append and return up to n tokens, fewer at the end of the context or where the rule allows no candidate."""
        choices: list[DraftToken] = []
        while len(choices) < n and 0 < self.length <= self._context_length:
            self._compute_near(self.length - 1)
            self._run(self.length - self._computed, self._binding)
            chosen = self._choose(
                self.length,
                self._candidate_tokens,
                self._candidate_logits,
                float(self._log_normalizer[0]),
                self._counts_of(self.length),
            )
            if chosen is NO_PROPOSAL:
                self._computed -= 1
                break
            choices.append(chosen)
            self._append(chosen.id)
        return tuple(choices)

    def steer(self, vector: np.ndarray | None, since: int) -> None:
        if self._biases is None:
            return
        if vector is not None and vector.shape != (self._biases.rank,):
            raise InvalidArgument(
                f"has the shape {vector.shape}, the drafter takes [{self._biases.rank}]", field="vector"
            )
        self._vector = vector
        self._steered_since = since
        self._biases_stale = True

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        """Append tokens and return log q of each [m] float32; uniform beyond the context's end."""
        check_scorable(self.length)
        first = self.length
        self.extend(tokens)
        log_q = np.full(len(tokens), -np.log(self._vocab_size), dtype=np.float32)
        for start, stop in self._runs(first - 1):
            logits = np.empty((stop - start, self._vocab_size), dtype=np.float32)
            one = np.ones(1, dtype=np.int64)  # candidate, which nobody reads
            log_normalizer = self._answer(start, stop, one, logits=logits)
            scored = logits[np.arange(stop - start), self._tokens[start + 1 : stop + 1]]
            log_q[start + 1 - first : stop + 1 - first] = scored - log_normalizer
        return log_q

    def propose_forced(self, tokens: Sequence[int]) -> tuple[DraftToken, ...]:
        """Append `tokens` [m] and return the proposals in place of each; -1 beyond the context's end."""
        check_scorable(self.length)
        first = self.length
        self.extend(tokens)
        choices = [NO_PROPOSAL] * len(tokens)
        for start, stop in self._runs(first - 1):
            shape = (stop - start, int(self._candidate_count[0]))
            candidates, logits = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.float32)
            log_normalizer = self._answer(
                start, stop, self._candidate_count, candidate_tokens=candidates, candidate_logits=logits
            )
            for row, normalizer in enumerate(log_normalizer.tolist()):
                position = start + 1 + row
                choices[position - first] = self._choose(
                    position, candidates[row], logits[row], normalizer, self._counts_of(position)
                )
        return tuple(choices)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens; the cache stays where it is, and rows past the end are written over."""
        check_truncation(length, self.length)
        self.length = length
        self._counts_of(length)
        self._computed = max(0, min(self._computed, length - 1))
        self._biases_stale = self._biases_stale or self._computed < self._steered_since

    def close(self) -> None:
        self.length = self._computed = self._context_length = 0
        self._binding.clear_binding_inputs()
        self._binding.clear_binding_outputs()
        if self._biases is not None:
            self._biases.close()
        self._allocate(0)

    def _counts_of(self, length: int) -> TokenCounts | None:
        """Return the counts of the first `length` tokens, where the rule has penalties."""
        if (counts := self._counts) is not None:
            counts.truncate(length)
            counts.extend(self._tokens[counts.length : length].tolist())
        return counts

    def _append(self, token: int) -> None:
        if self.length == len(self._tokens):
            self._grow(self.length + 1)
        self._tokens[self.length] = token
        self.length += 1

    def _compute_near(self, position: int) -> None:
        """Fill the cache until at most `PREFILL_TOKENS` up to `position` are left, all with the same biases."""
        needed = max(0, position + 1 - self._reach)
        if not self._first_computed <= needed <= self._computed:
            self._first_computed = self._computed = needed
            self._biases_stale = self._biases_stale or needed < self._steered_since
        if self._biases_stale and self._biases is not None:
            self._renew_biases(self._biases, position)
        while position + 1 - self._computed > PREFILL_TOKENS:
            self._run(PREFILL_TOKENS, self._binding)

    def _renew_biases(self, biases: _Biases, position: int) -> None:
        """Finish the prompt up to `position` unsteered, then write the biases of the vector for what follows."""
        prompt_end = min(self._steered_since, position)
        if self._computed < self._steered_since:
            biases.write(None)
            while self._computed < prompt_end:
                self._run(min(PREFILL_TOKENS, prompt_end - self._computed), self._binding)
        if self._computed >= self._steered_since:
            biases.write(self._vector)
            self._biases_stale = False

    def _run(self, n: int, binding: onnxruntime.IOBinding) -> None:
        """Put the next n tokens into the cache; the bound outputs answer for the last of them."""
        computed = self._computed
        self._logit_rows[0] = n - 1
        self._last_position[0] = computed + n - 1
        self._length_after[...] = computed + n
        try:  # not `_translated`: a context manager costs this loop 2 us
            binding.bind_input("tokens", "cpu", 0, np.int64, (1, n), self._tokens_address + 8 * computed)
            self._session.run_with_iobinding(binding)
        except _RUNTIME_ERRORS as error:
            raise Internal(f"running a drafter: {error}") from error
        self._computed = computed + n

    def _runs(self, start: int) -> Iterator[tuple[int, int]]:
        """Yield positions (start, stop) of one run each, from `start` to the prefix's last but one.

        Each row answers for the token after it. The caller carries each run out before it takes the next.
        """
        end = min(self.length - 1, self._context_length)
        while start < end:
            self._compute_near(start)
            border = self._steered_since if self._biases_stale else end  # no run is on both sides of it
            stop = min(start + SCORED_TOKENS, border, end)
            yield start, stop
            start = stop

    def _answer(self, start: int, stop: int, candidate_count: np.ndarray, **outputs: np.ndarray) -> np.ndarray:
        """Put positions up to `stop` into the cache; `outputs` are filled for what follows start .. stop - 1.

        Returns:
            [stop - start] float32, the log normalizer of each.
        """
        rows = np.arange(start, stop, dtype=np.int64) - self._computed
        log_normalizer = np.empty(len(rows), dtype=np.float32)
        binding = self._session.io_binding()
        self._bind_cache(binding)
        with _translated(Internal, "binding a drafter's buffers"):
            _bind_input(binding, "logit_rows", rows)
            _bind_input(binding, "candidate_count", candidate_count)
            for name, array in {"log_normalizer": log_normalizer, **outputs}.items():
                _bind_output(binding, name, array)
        self._run(stop - self._computed, binding)
        return log_normalizer

    def _grow(self, length: int) -> None:
        """Make room for `length` tokens, by doubling; the cache never exceeds the context."""
        self._allocate(max(length, 2 * len(self._tokens), FIRST_CAPACITY))

    def _allocate(self, capacity: int) -> None:
        tokens = np.zeros(capacity, dtype=np.int64)
        tokens[: self.length] = self._tokens[: self.length]
        self._tokens = tokens
        self._tokens_address = tokens.ctypes.data
        layers, pair, one, kv_heads, had, head_dim = self._cache.shape
        rows = min(capacity, self._context_length)
        if rows != had:
            cache = np.zeros((layers, pair, one, kv_heads, rows, head_dim), dtype=self._cache.dtype)
            cache[..., : self._computed, :] = self._cache[..., : self._computed, :]
            self._cache = cache
            if rows:
                self._bind_cache(self._binding)

    def _bind_cache(self, binding: onnxruntime.IOBinding) -> None:
        halves = [half for layer in self._cache for half in layer]
        with _translated(Internal, "binding a drafter's cache"):
            _bind_input(binding, "last_position", self._last_position)
            _bind_input(binding, "length", self._length_after)
            for name, half in zip(_cache_names("past", self._layers), halves, strict=True):
                _bind_input(binding, name, half)
            for name, half in zip(_cache_names("present", self._layers), halves, strict=True):
                _bind_output(binding, name, half)
            if self._biases is not None:
                for name, row in zip(_bias_names(self._layers), self._biases.rows, strict=True):
                    _bind_input(binding, name, row)


def _cache_names(side: str, layers: int) -> list[str]:
    return [f"{side}_{kind}.{layer}" for layer in range(layers) for kind in ("key", "value")]


def _bias_names(layers: int) -> list[str]:
    return [f"{_BIAS}{layer}" for layer in range(layers)]


def _bind_input(binding: onnxruntime.IOBinding, name: str, array: np.ndarray) -> None:
    binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


def _bind_output(binding: onnxruntime.IOBinding, name: str, array: np.ndarray) -> None:
    binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
