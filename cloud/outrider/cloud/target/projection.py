"""The cloud's half of steering (SD²): from a target's hidden states to the short vector that travels to the edge.

"Steering Pretrained Drafters during Speculative Decoding" (AAAI 2026, arXiv 2511.09844), section 3: the residual
stream that enters a low, a middle and a high layer is joined, g = LayerNorm(W_hml [l; m; h]), and a drafter adds W_s g
to the up projection of every MLP. Here W_s = U V: the vector V g leaves the cloud, U lives in the drafter.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from outrider.proto.errors import ModelRefused, NotFound
from outrider.proto.plumbing.files import sha256_of

PROJECTION_FILE = "projection.safetensors"
FORMAT = "outrider-projection/2"
EPSILON = 1e-6  # of a tap's mean square


def default_layers(layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs to tap in a target of L `layers`: 3, L/2 and L - 3, fewer where they coincide."""
    return tuple(sorted({min(3, layers - 1), layers // 2, max(0, layers - 3)}))


class Projection(nn.Module):
    """The map c = V W [l / |l|; m / |m|; h / |h|] of one position's tapped residual streams; |.| is their RMS.

    SD² (arXiv 2511.09844) has g = LayerNorm(W [l; m; h]), of which c = V g would travel. With the taps normalised
    before W instead, what follows is one matrix V W [rank, taps * hidden] for a verifier, a fraction of W to read.
    W begins as identities side by side, so that g starts as the sum of the normalised taps.

    Attributes:
        layers: indices of the layers whose input is tapped, ascending.
        hidden: width of the target's residual stream.
        rank: numbers in a vector.
        target: id of the target that it was trained with.
    """

    def __init__(self, layers: Sequence[int], hidden: int, rank: int, target: str = "") -> None:
        super().__init__()
        self.layers = tuple(layers)
        self.hidden = hidden
        self.rank = rank
        self.target = target
        self.mix = nn.Linear(len(self.layers) * hidden, hidden, bias=False)
        self.down = nn.Linear(hidden, rank, bias=False)
        with torch.no_grad():
            self.mix.weight.copy_(torch.eye(hidden).repeat(1, len(self.layers)))
            self.down.weight.normal_(std=hidden**-0.5)

    def forward(self, taps: torch.Tensor) -> torch.Tensor:
        """Return vectors [..., rank] of `taps` [..., taps * hidden]; both float32."""
        vectors: torch.Tensor = self.down(self.mix(normalised(taps, len(self.layers))))
        return vectors

    def save(self, path: Path) -> str:
        facts = {"layers": self.layers, "hidden": self.hidden, "rank": self.rank, "target": self.target}
        tensors = {name: tensor.detach().float().cpu().contiguous() for name, tensor in self.state_dict().items()}
        save_file(tensors, path, metadata={"format": FORMAT, "facts": json.dumps(facts)})
        return projection_id(path)

    @staticmethod
    def load(path: Path) -> Projection:
        """Read what `save` wrote.

        Raises:
            NotFound: there is no such file.
            ModelRefused: it is no projection.
        """
        if not path.is_file():
            raise NotFound(f"there is no {path}; `outrider train steer` writes one", field="steering")
        try:
            with safe_open(path, framework="pt") as stored:
                metadata = stored.metadata() or {}
                tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - not a mapping
            if metadata.get("format") != FORMAT:
                raise ModelRefused(f"{path} is no {FORMAT}", field="steering")
            facts = json.loads(metadata["facts"])
            projection = Projection(facts["layers"], facts["hidden"], facts["rank"], facts["target"])
            projection.load_state_dict(tensors)
        except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ModelRefused(f"{path} is no {FORMAT}: {error}", field="steering") from error
        return projection.eval().requires_grad_(False)


def normalised(taps: torch.Tensor, count: int) -> torch.Tensor:
    """Return `taps` [..., count * hidden] with each of the `count` scaled to a root mean square of one."""
    each = taps.unflatten(-1, (count, -1))
    return functional.rms_norm(each, each.shape[-1:], eps=EPSILON).flatten(-2)


def projection_id(path: Path) -> str:
    """Return the first twelve hexadecimal digits of the file's SHA-256, which name it in a drafter's manifest."""
    return sha256_of(path)[:12]


class FoldedProjection:
    """A trained projection for a verifier: the same vectors by one small matrix product.

    A step leaves no cache warm, so on a CPU a vector costs what its calls and the weights that it reads cost.
    """

    def __init__(self, projection: Projection, device: torch.device | None) -> None:
        self.layers = projection.layers
        with torch.no_grad():
            self._weight = (projection.down.weight.double() @ projection.mix.weight.double()).float().to(device)

    @torch.inference_mode()
    def __call__(self, taps: torch.Tensor) -> list[np.ndarray]:
        """Return a vector [rank] float32, on the host, of each row of `taps` [n, taps * hidden] float32."""
        vectors = functional.linear(normalised(taps, len(self.layers)), self._weight)
        return list(vectors.cpu().numpy())


class Taps:
    """The residual stream that entered some layers of a transformers model, seen by hooks; no model code is touched.

    A step may take several passes; the rows whose logits it gave are counted through all of them, like the logits.
    Nothing is copied before it is asked for.
    """

    def __init__(self, model: Any, layers: Sequence[int]) -> None:
        """Tap `layers`; raise ModelRefused where the model has no list of decoder layers, or a shorter one."""
        stack = decoder_layers(model)
        if max(layers) >= len(stack):
            raise ModelRefused(f"it has {len(stack)} layers; layer {max(layers)} cannot be tapped", field="steering")
        self._entering: dict[int, torch.Tensor] = {}
        self._passes: list[tuple[dict[int, torch.Tensor], Sequence[int]]] = []
        self._layers = tuple(layers)
        self._hooks = [
            stack[layer].register_forward_pre_hook(partial(self._enter, layer), with_kwargs=True) for layer in layers
        ]

    def _enter(self, layer: int, _: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._entering[layer] = positional[0] if positional else named["hidden_states"]

    def joined(self) -> torch.Tensor:
        """Return [batch, positions, taps * hidden] of the newest pass, in the model's dtype."""
        return torch.cat([self._entering[layer] for layer in self._layers], dim=-1)

    def entered(self) -> dict[int, torch.Tensor]:
        """Return what entered each layer in the newest pass, [batch, positions, hidden]."""
        return dict(self._entering)

    def enter(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note what entered the layers, in their order, in a pass without the model's own modules."""
        self._entering.update(zip(self._layers, tensors, strict=True))

    def begin(self) -> None:
        """Begin a step and forget the last one."""
        self._passes.clear()

    def keep(self, rows: Sequence[int]) -> None:
        """Note after a pass that its `rows` gave the next logits."""
        self._passes.append((dict(self._entering), rows))

    def of(self, rows: Sequence[int]) -> torch.Tensor:
        """Return [n, taps * hidden] float32 that entered the layers in `rows` [n] of the step's logits."""
        parts = [entering[layer][0, row] for entering, row in map(self._source, rows) for layer in self._layers]
        return torch.cat(parts).view(len(rows), -1).float()

    def _source(self, row: int) -> tuple[dict[int, torch.Tensor], int]:
        """Return the pass that gave row `row` of the step's logits, and which of its own rows that was."""
        for entering, kept in self._passes:
            if row < len(kept):
                return entering, kept[row]
            row -= len(kept)
        raise IndexError(f"the step gave no such row; {row} too many")

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._entering.clear()
        self._passes.clear()


def decoder_layers(model: Any) -> nn.ModuleList:
    """Return the stack of decoder layers: the first list of modules as long as the configuration says."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ModelRefused(f"it has no list of {count} decoder layers to tap", field="steering")
