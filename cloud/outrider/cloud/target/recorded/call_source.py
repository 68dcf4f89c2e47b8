"""Python source of a list of calls, compiled: the shortest way from one call to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from outrider.cloud.target.recorded.call_recorder import Call, CallSequence, RowCount, Value, leaves, part, values_in

Pass = Callable[..., tuple[torch.Tensor, ...]]
Wrap = Callable[[Any, Callable[..., Any]], Callable[..., Any]]

_NAME = "straight"


def written(sequence: CallSequence, wrap: Wrap) -> Pass:
    """Return a function of the sequence's inputs, in their order, that makes its calls and returns its outputs.

    The last dimension of `tokens` is the number of rows, that of `wanted` how many of them are. Results are forgotten
    after their last use.
    """
    source = _Source(sequence, wrap)
    namespace: dict[str, Any] = source.constants
    exec(compile(source.text, f"<{_NAME}>", "exec"), namespace)  # noqa: S102 - made of the sequence alone
    straight: Pass = namespace[_NAME]
    return straight


class _Source:
    """The text of the function, and the objects that it names."""

    def __init__(self, sequence: CallSequence, wrap: Wrap) -> None:
        self.constants: dict[str, Any] = {}
        self._names: dict[Value, str] = {}
        self._wrap = wrap
        inputs = {name: self._name(value) for name, value in sequence.inputs.items()}
        lines = [f"def {_NAME}({', '.join(inputs.values())}):"]
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
        """Return the expression of a call."""
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
