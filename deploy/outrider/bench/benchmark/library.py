"""Baselines of transformers: `generate` and `generate(assistant_model=…)`, without any link.

Each runs in a process of its own (`python -m outrider.bench.benchmark.library`), so that neither its threads nor its
memory meet those of the benchmark. The first request names the models, each further one holds a prompt.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.cloud.config import DTYPES
from outrider.deploy.child import Child, answer_requests
from outrider.drafters import find_package
from outrider.proto.errors import ConfigError, Internal
from outrider.proto.session import EdgeStatistics
from outrider.proto.types import Sampling

if TYPE_CHECKING:
    import torch

# No hub is asked: everything is in folders.
QUIET = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}


@dataclass(frozen=True, slots=True)
class LibraryText:
    """One text by transformers.

    Attributes:
        tokens: [n] new tokens, with the end token where there is one.
        seconds: time from the call of `generate` to its return.
        arrivals: [n] seconds from the call until each token was handed to the streamer.
        steps: forward passes of the target, the prompt's included.
        accepted: draft tokens in the text; 0 without an assistant.
        questioned: drafts that the target verified, up to the first wrong one of each step.
    """

    tokens: tuple[int, ...]
    seconds: float
    arrivals: tuple[float, ...]
    steps: int
    accepted: int
    questioned: int

    @property
    def statistics(self) -> EdgeStatistics:
        """Counts in the form that an edge keeps."""
        return EdgeStatistics(steps=self.steps, hits=self.accepted, compared=self.questioned)


class LibraryProcess(Child):
    """`generate` of transformers in a process of its own, as an async context manager.

    With an assistant it runs by the library's default schedule: 20 tokens a round, cut off where the drafter is less
    than 40 % sure (transformers 5).

    Args:
        target_folder: folder of the target, with safetensors.
        sampling: temperature, max_tokens and seed count; anything else must be off.
        assistant_folder: transformers folder of the drafter; None: without.
        threads: threads of torch; 0: torch's own choice.
        dtype: type of the weights, one of `DTYPES`.

    Raises:
        ConfigError: a folder or the sampling is not usable; the field says which.
        Internal: the models do not load (raised on entering).
    """

    def __init__(
        self,
        target_folder: Path,
        sampling: Sampling,
        *,
        assistant_folder: Path | None = None,
        threads: int,
        dtype: str,
    ) -> None:
        check_sampling(sampling)
        if dtype not in DTYPES:
            raise ConfigError(f"{dtype!r} is none of {', '.join(DTYPES)}", field="dtype")
        # OpenMP reads its variable when torch is loaded.
        super().__init__(__name__, "transformers", QUIET | ({"OMP_NUM_THREADS": str(threads)} if threads else {}))
        self._sampling = sampling
        self._models = {
            "target": str(_model_folder(target_folder, "target")),
            "assistant": str(drafter_folder_of(assistant_folder)) if assistant_folder else None,
            "threads": threads,
            "dtype": dtype,
        }

    async def prepare(self) -> None:
        """Load the models."""
        await self.ask(self._models)

    async def text(self, prompt: Sequence[int], max_tokens: int | None = None) -> LibraryText:
        """Return what follows `prompt` [n], token ids; at most `max_tokens`, None: the sampling's limit.

        Raises:
            ConfigError: the prompt holds no token.
            Internal: the library failed.
        """
        if not prompt:
            raise ConfigError("holds no token", field="prompt")
        own = self._sampling
        limit = own.max_tokens if max_tokens is None else max_tokens
        request = {"prompt": list(prompt), "max_tokens": limit, "temperature": own.temperature, "seed": own.seed}
        text = await self.ask(request)
        return LibraryText(**text | {"tokens": tuple(text["tokens"]), "arrivals": tuple(text["arrivals"])})


def drafter_folder_of(folder: Path | None) -> Path:
    """Return `folder` if it holds a drafter of transformers (what `outrider train drafter` writes).

    Raises:
        ConfigError: it is None or holds something else, such as an ONNX package.
    """
    if folder is None:
        raise ConfigError(
            "is missing; hf-assisted needs the drafter as a transformers folder, which `outrider train drafter` writes",
            field="hf_drafter",
        )
    return _model_folder(folder, "hf_drafter")


def write_drafter(name: str, folder: Path) -> Path:
    """Write an embedded drafter for transformers, the floats that its 8-bit weights stand for; return `folder`.

    Raises:
        ConfigError: it is steered.
    """
    from outrider.cloud.learning.parent import load_parent

    package = find_package(name)
    if package.steering is not None:
        raise ConfigError(f"is missing; {name} is steered, which transformers cannot do", field="hf_drafter")
    load_parent(package).model.save_pretrained(folder)
    return folder


def _model_folder(folder: Path, field: str) -> Path:
    folder = folder.expanduser()
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        found = "holds no transformers model" if folder.is_dir() else "is no folder"
        if (folder / "model.onnx").is_file():
            found = "holds an ONNX package, which transformers cannot run"
        raise ConfigError(f"{folder} {found}; give one with config.json and *.safetensors", field=field)
    return folder


def check_sampling(sampling: Sampling) -> None:
    """Refuse what transformers would not do in the same way.

    Raises:
        ConfigError: anything but temperature, max_tokens and seed is set.
    """
    if sampling != Sampling(temperature=sampling.temperature, max_tokens=sampling.max_tokens, seed=sampling.seed):
        raise ConfigError(
            "the baselines of transformers support temperature, max_tokens and seed alone; leave the rest out, or "
            "choose other --modes",
            field="sampling",
        )


class _Watch:
    """A forward hook and a streamer that count the target's passes and their rows, and note when tokens come."""

    def __init__(self) -> None:
        self.began_s = time.perf_counter()
        self.rows: list[int] = []  # [steps] positions in each forward pass
        self.commits: list[int] = []  # [steps] tokens of each step
        self.arrivals_s: list[float] = []
        self._prompt_seen = False

    def forward(self, _model: object, _arguments: object, keywords: dict[str, torch.Tensor], _output: object) -> None:
        self.rows.append(int(keywords["input_ids"].shape[-1]))

    def put(self, tokens: torch.Tensor) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        count = tokens.numel()
        self.commits.append(count)
        self.arrivals_s.extend([time.perf_counter() - self.began_s] * count)

    def end(self) -> None:
        """Do nothing: a streamer needs the method."""

    def verified(self, prompt_tokens: int) -> tuple[int, int]:
        """Return accepted drafts, and drafts verified up to the first wrong one of each step."""
        accepted = questioned = 0
        for step, (rows, commit) in enumerate(zip(self.rows, self.commits, strict=True)):
            drafts = rows - (1 if step else prompt_tokens)
            right = commit - 1
            accepted += right
            # The last step may end at the limit or the end token, before a draft was found wrong.
            questioned += right + (right < drafts and step < len(self.rows) - 1)
        return accepted, questioned


def _models(target: str, assistant: str | None, threads: int, dtype: str) -> tuple[Any, Any]:
    """Load the target and the assistant; None without one."""
    import torch
    from transformers import AutoModelForCausalLM

    def load(folder: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), use_safetensors=True, trust_remote_code=False
        )

    if threads:
        torch.set_num_threads(threads)
    return load(target), load(assistant) if assistant else None


def _text(
    target: Any, assistant: Any, prompt: Sequence[int], *, max_tokens: int, temperature: float, seed: int
) -> LibraryText:
    import torch

    how: dict[str, Any] = {"do_sample": False}
    if temperature:
        # A model's own generation_config may truncate or penalise; the target's plain distribution is compared.
        how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    torch.manual_seed(seed)
    input_ids = torch.tensor([prompt])
    watch = _Watch()
    hook = target.register_forward_hook(watch.forward, with_kwargs=True)
    try:
        generated = target.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            assistant_model=assistant,
            streamer=watch,
            max_new_tokens=max_tokens,
            repetition_penalty=1.0,
            **how,
        )
    finally:
        hook.remove()
    seconds = time.perf_counter() - watch.began_s
    accepted, questioned = watch.verified(len(prompt))
    return LibraryText(
        tokens=tuple(generated[0, len(prompt) :].tolist()),
        seconds=seconds,
        arrivals=tuple(watch.arrivals_s),
        steps=len(watch.rows),
        accepted=accepted,
        questioned=questioned,
    )


async def _serve() -> None:
    models: tuple[Any, Any] | None = None

    async def answer(request: dict[str, Any]) -> Any:
        nonlocal models
        try:
            with redirect_stdout(sys.stderr):  # whatever the libraries print
                if models is not None:
                    return asdict(_text(*models, **request))
                models = _models(**request)
        except Exception as error:  # the parent must get it
            raise Internal(f"transformers failed: {type(error).__name__}: {error}", field="library") from error

    await answer_requests(answer)


if __name__ == "__main__":
    asyncio.run(_serve())
