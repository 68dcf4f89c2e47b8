"""A model's pass without the model's Python: its own torch calls in a straight line, a few of them joined.

In a small pass the way to the operators takes as long as some of them. The calls are recorded from the model
(`call_recorder`), so no architecture is written down here. Those that sizes and weights alone decide are made once,
equal ones are shared, products of the same rows become one product, and the model's own pass checks the result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from outrider.cloud.target import attention
from outrider.cloud.target.attention import RaggedBatch, RowSpan
from outrider.cloud.target.kv_cache import PagedKVCache
from outrider.cloud.target.latent_attention import OURS
from outrider.cloud.target.projection import Taps
from outrider.cloud.target.recorded.call_fusion import shortened, trimmed
from outrider.cloud.target.recorded.call_recorder import (
    Call,
    CallRecorder,
    CallSequence,
    NotStraight,
    RowCount,
    Value,
    leaves,
    part,
    unified,
    values_in,
)
from outrider.cloud.target.recurrence import attach, rows_of
from outrider.proto.errors import ModelRefused

Pass = Callable[..., tuple[torch.Tensor, ...]]
Wrap = Callable[[Any, Callable[..., Any]], Callable[..., Any]]

# Relative to the size of the logits, as in the check of paged attention; only rounding may differ.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
_RECORDED_ROWS = (5, 2), (7, 3)  # rows and wanted ones; none is a multiple of another
_CHECKED_ROWS = (1, 1), (9, 4)
_ATTENTION = f"{OURS}recorded"
_FUNCTION = "straight"  # name of the compiled pass
_HANDED_ON = ("scaling", "sliding_window", "softcap", "s_aux", "outrider_batch")
# What passes raise that the recorder cannot follow; the model's own pass then says what is wrong, if anything is.
_IMPOSSIBLE = (NotStraight, ModelRefused, TypeError, AttributeError, NotImplementedError, RuntimeError)

log = logging.getLogger(__name__)


class PassInputs(NamedTuple):
    """Inputs of a pass: tokens and positions [1, rows] int64, the rows [n] whose logits are wanted, their sessions."""

    tokens: torch.Tensor
    positions: torch.Tensor
    wanted: torch.Tensor
    batch: RaggedBatch


class StraightPass:
    """The calls of a model's pass, in order; `linears` are the linear layers among them, joined or its own."""

    def __init__(self, recording: CallSequence, model: nn.Module) -> None:
        """Simplify a recording of `model`, whose joined linear layers share one weight from then on."""
        self._sequence = shortened(recording, model)
        functions = [call.function for call in self._sequence.calls]
        self.linears = nn.ModuleList(function for function in functions if isinstance(function, nn.Linear))

    def compiled(self, layers: Sequence[int] = (), wrap: Wrap = lambda _, function: function) -> Pass:
        """Return a function of what `PassInputs` has, which forgets results after their last use.

        Args:
            layers: layers whose input [1, rows, hidden] it returns after the logits [1, n, vocab].
            wrap: what to call in place of a function, given what was recorded and the function.
        """
        source = _Source(trimmed(self._sequence, ["logits", *map(str, layers)]), wrap)
        namespace: dict[str, Any] = source.constants
        exec(compile(source.text, f"<{_FUNCTION}>", "exec"), namespace)  # noqa: S102 - made of the sequence alone
        straight: Pass = namespace[_FUNCTION]
        return straight


@torch.inference_mode()
def straight_pass(model: Any) -> StraightPass | None:
    """Return the straight pass of a model whose linear layers are plain, or None if it has none.

    It is recorded on a small cache of its own and compared with the model's own pass.
    """
    try:
        return _checked(model)
    except _IMPOSSIBLE as error:
        log.info("%s runs as it is written, since the pass %s", type(model).__name__, error)
        return None
    finally:
        model.set_attn_implementation(attention.NAME)


def _checked(model: Any) -> StraightPass:
    if attach(model):
        raise NotStraight("keeps states by session")
    parameter = next(model.parameters())
    pool = PagedKVCache(32, 16, parameter.dtype, parameter.device)
    one, other = (_recorded(model, pool, rows, wanted) for rows, wanted in _RECORDED_ROWS)
    straight = StraightPass(unified(one, other), model)
    run = straight.compiled()
    model.set_attn_implementation(attention.NAME)
    for rows, wanted in _CHECKED_ROWS:
        given = _example(model, pool, rows, wanted)
        own = own_pass(model, *given)[0].float()
        difference = float((run(*given)[0].float() - own).norm() / own.norm())
        if not difference <= _TOLERANCE[parameter.dtype]:
            raise NotStraight(f"differs by {difference:.2g} when made straight")
    return straight


def _recorded(model: Any, pool: PagedKVCache, rows: int, wanted: int) -> CallSequence:
    from transformers import AttentionInterface

    given = _example(model, pool, rows, wanted)
    recorder = CallRecorder(rows, given._asdict())
    taps = Taps(model, range(model.config.get_text_config().num_hidden_layers))

    def attend(module: Any, query: Any, key: Any, value: Any, _: Any, **keywords: Any) -> Any:
        """Have attention be one call of the recording, with nothing but what it looks at."""
        named = {name: keywords[name] for name in _HANDED_ON if keywords.get(name) is not None}
        return recorder.opaque(attention.paged_attention, (module, query, key, value, None), named, pure=False)

    AttentionInterface.register(_ATTENTION, attend)
    model.set_attn_implementation(_ATTENTION)
    try:
        with recorder, recorder.leaves([module for module in model.modules() if type(module) is nn.Linear]):
            (logits,) = own_pass(model, *given)
        recorder.output("logits", logits)
        for layer, entered in taps.entered().items():
            recorder.output(str(layer), entered)
    finally:
        taps.close()
    return recorder.recording


def _example(model: Any, pool: PagedKVCache, rows: int, wanted: int) -> PassInputs:
    """Return inputs of a pass of one session that has nothing but these rows."""
    generator = torch.Generator().manual_seed(rows)
    tokens = torch.randint(0, model.config.get_text_config().vocab_size, (1, rows), generator=generator)
    cache = pool.allocate(rows)
    batch = RaggedBatch(pool, [RowSpan(cache, 0, rows, 0)], cache.slots[:rows])
    pool.release(cache)
    positions = torch.arange(rows, 2 * rows)[None]  # not those that a model would count itself
    return PassInputs(tokens, positions, torch.arange(rows)[:: rows // wanted][:wanted], batch)


def own_pass(
    model: Any, tokens: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, batch: RaggedBatch
) -> tuple[torch.Tensor]:
    """Return logits [1, n, vocab] of the model as it is written."""
    with rows_of(batch.spans):
        logits: torch.Tensor = model(
            input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=wanted, outrider_batch=batch
        ).logits
    return (logits,)


class _Source:
    """The text of a function that makes a sequence's calls, and the objects that it names.

    The last dimension of `tokens` is the number of rows, that of `wanted` how many of them are.
    """

    def __init__(self, sequence: CallSequence, wrap: Wrap) -> None:
        self.constants: dict[str, Any] = {}
        self._names: dict[Value, str] = {}
        self._wrap = wrap
        inputs = {name: self._name(value) for name, value in sequence.inputs.items()}
        lines = [f"def {_FUNCTION}({', '.join(inputs.values())}):"]
        lines += [f" rows, wanted = {inputs['tokens']}.shape[-1], {inputs['wanted']}.shape[-1]"]
        last = _last_uses(sequence)
        for call in sequence.calls:
            lines.append(f" {self._name(call.result)} = {self._call(call)}")
            lines.extend(f" del {self._name(value)}" for value in last.get(call, ()))
        outputs = "".join(f"{self._name(value)}, " for value in sequence.outputs.values())
        self.text = "\n".join([*lines, f" return ({outputs})\n"])

    def _name(self, value: Value) -> str:
        return self._names.setdefault(value, f"v{len(self._names)}")

    def _call(self, call: Call) -> str:
        arguments = [self._expression(each) for each in call.arguments]
        if call.function is part or getattr(call.function, "__name__", "") == "__getitem__":
            return f"{arguments[0]}[{arguments[1]}]"
        function = call.function.forward if isinstance(call.function, nn.Module) else call.function
        named = [f"{name}={self._expression(each)}" for name, each in call.keywords.items()]
        return f"{self._constant(self._wrap(call.function, function))}({', '.join(arguments + named)})"

    def _expression(self, structure: Any) -> str:
        match structure:
            case Value():
                return self._name(structure)
            case RowCount():
                return f"{structure.factor} * {'wanted' if structure.wanted else 'rows'}"
            case bool() | int() | str() | None:
                return repr(structure)
            case tuple() | list() | slice() if not any(
                isinstance(each, Value | RowCount) for each in leaves(structure)
            ):
                return self._constant(structure)
            case tuple():
                return f"({''.join(f'{self._expression(each)}, ' for each in structure)})"
            case list():
                return f"[{', '.join(map(self._expression, structure))}]"
            case slice():
                ends = structure.start, structure.stop, structure.step
                return f"slice({', '.join(map(self._expression, ends))})"
            case dict():
                return f"{{{', '.join(f'{name!r}: {self._expression(each)}' for name, each in structure.items())}}}"
            case _:
                return self._constant(structure)

    def _constant(self, thing: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = thing
        return name


def _last_uses(sequence: CallSequence) -> dict[Call, list[Value]]:
    """Return the values that each call is the last to need."""
    seen = set(sequence.outputs.values()) | set(sequence.inputs.values())
    uses: dict[Call, list[Value]] = {}
    for call in reversed(sequence.calls):
        needed = dict.fromkeys([call.result, *values_in((call.arguments, call.keywords))])
        uses[call] = [value for value in needed if value not in seen]
        seen.update(needed)
    return uses
