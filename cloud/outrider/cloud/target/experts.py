"""Products of a mixture's experts in which a row keeps its bits, whatever other rows of a step choose the same expert.

A grouped product adds up a row otherwise for another number of rows in its group. Here each expert that some row chose
has products of its own, of a multiple of eight rows, filled up with zeros, and a row adds up its experts in the order
in which it chose them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

NAME = "outrider_rows"
_ROWS = 8


def experts_by_rows(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Apply experts, by transformers' interface of expert functions.

    Args:
        module: the experts, with transformers' names for their weights.
        hidden_states: [rows, hidden].
        top_k_index: [rows, k] int64, the experts that each row chose; a number beyond the experts is none.
        top_k_weights: [rows, k], their weights.

    Returns:
        [rows, hidden].
    """
    chosen = top_k_index.flatten()
    results = hidden_states.new_zeros(len(chosen), hidden_states.shape[1])
    first = "gate_up_proj" if module.has_gate else "up_proj"
    for expert in chosen.unique().tolist():
        if expert >= module.num_experts:
            continue
        places = (chosen == expert).nonzero()[:, 0]
        rows = hidden_states[places // top_k_index.shape[1]]
        rows = functional.pad(rows, (0, 0, 0, -len(places) % _ROWS))
        rows = _product(module, first, expert, rows)
        rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
        rows = _product(module, "down_proj", expert, rows)
        if module.has_post_expert_norm:
            rows = module.post_expert_norm(rows)
        results[places] = rows[: len(places)]
    weighted = results.view(*top_k_index.shape, -1) * top_k_weights[..., None]
    return weighted.sum(dim=1).to(hidden_states.dtype)


def set_experts(model: Any) -> str | None:
    """Apply a model's experts by rows from now on.

    Returns:
        Name of how they were applied; None: it has none, or this transformers lets nobody else apply them.
    """
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:
        return None
    if not model._can_set_experts_implementation():
        return None
    before: str = model.config._experts_implementation
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_by_rows)
    model.set_experts_implementation(NAME)
    return before


def _product(module: Any, name: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
    weight = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    return functional.linear(rows, weight.T if module.is_transposed else weight, bias)
