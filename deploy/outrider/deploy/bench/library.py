"""The baselines that transformers itself gives: `generate`, and `generate(assistant_model=…)`, with no link at all.

They run in a process of their own (`python -m outrider.deploy.bench.library`, one JSON object in and one out), so that
neither their threads nor their memory meet those of the benchmark.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.proto.errors import ConfigError, Internal
from outrider.proto.types import Sampling

WARM_UP_TOKENS = 8
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class LibraryText:
    """One text as transformers made it.

    Attributes:
        tokens: [n] new tokens, with the end token where there is one.
        seconds: from the call of `generate` to its return.
        arrivals_s: [n] when each token was handed to the streamer, from the call on.
        steps: forward passes of the target, the prompt's included.
        accepted: draft tokens in the text; 0 without an assistant.
        questioned: drafts that the target judged, up to the first wrong one of each step.
    """

    tokens: tuple[int, ...]
    seconds: float
    arrivals_s: tuple[float, ...]
    steps: int
    accepted: int
    questioned: int

    @property
    def first_token_s(self) -> float:
        """When the first token came."""
        return self.arrivals_s[0]


@dataclass(frozen=True, slots=True)
class _Request:
    """What the process is asked for."""

    target: str
    assistant: str | None
    prompts: tuple[tuple[int, ...], ...]
    temperature: float
    max_tokens: int
    seed: int
    threads: int
    dtype: str


def library_generate(
    target_folder: Path, prompts: Sequence[Sequence[int]], sampling: Sampling, *, threads: int, dtype: str
) -> list[LibraryText]:
    """The texts that `generate` of transformers makes, one prompt after the other.

    Args:
        target_folder: of the target, with safetensors.
        prompts: token ids, [n] of each.
        sampling: temperature, max_tokens and seed count; anything else must be off.
        threads: of torch; 0: torch's own choice.
        dtype: of the weights, one of `DTYPES`.

    Raises:
        ConfigError: a folder, the sampling or a prompt is not usable; the field says which.
        Internal: the process failed; the message is its last line.
    """
    return _in_a_process(_request(target_folder, None, prompts, sampling, threads, dtype))


def library_assisted(
    target_folder: Path,
    drafter_folder: Path,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    threads: int,
    dtype: str,
) -> list[LibraryText]:
    """As `library_generate`, with the drafter as `assistant_model` and its default schedule of assistant tokens.

    The default is 20 tokens a round, cut off where the drafter is less than 40 % sure (transformers 5).
    """
    drafter = drafter_folder_of(drafter_folder)
    return _in_a_process(_request(target_folder, drafter, prompts, sampling, threads, dtype))


def drafter_folder_of(folder: Path | None) -> Path:
    """`folder`, if it holds a drafter as transformers saves it (what `outrider train drafter` writes).

    Raises:
        ConfigError: it is None or holds something else, such as an ONNX package.
    """
    if folder is None:
        raise ConfigError(
            "is missing; hf-assisted needs the drafter as a transformers folder, which `outrider train drafter` writes",
            field="hf_drafter",
        )
    return _model_folder(folder, "hf_drafter")


def _model_folder(folder: Path, field: str) -> Path:
    folder = folder.expanduser()
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        found = "holds an ONNX package, which transformers cannot run" if (folder / "model.onnx").is_file() else None
        found = found or ("holds no transformers model" if folder.is_dir() else "is no folder")
        raise ConfigError(f"{folder} {found}; give one with config.json and *.safetensors", field=field)
    return folder


def _request(
    target: Path,
    assistant: Path | None,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    threads: int,
    dtype: str,
) -> _Request:
    plain = Sampling(temperature=sampling.temperature, max_tokens=sampling.max_tokens, seed=sampling.seed)
    if sampling != plain:
        raise ConfigError(
            "the baselines of transformers run with temperature, max_tokens and seed alone; leave the rest as it is",
            field="sampling",
        )
    if dtype not in DTYPES:
        raise ConfigError(f"{dtype!r} is none of {', '.join(DTYPES)}", field="dtype")
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ConfigError("holds no token", field=f"prompts[{index}]")
    return _Request(
        target=str(_model_folder(target, "target")),
        assistant=None if assistant is None else str(assistant),
        prompts=tuple(tuple(prompt) for prompt in prompts),
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        seed=sampling.seed,
        threads=threads,
        dtype=dtype,
    )


def _in_a_process(request: _Request) -> list[LibraryText]:
    # OpenMP reads its variable when torch is loaded. No hub is asked: everything is in folders.
    threads = {"OMP_NUM_THREADS": str(request.threads)} if request.threads else {}
    done = subprocess.run(
        (sys.executable, "-m", "outrider.deploy.bench.library"),
        input=json.dumps(asdict(request)),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | threads | {"HF_HUB_OFFLINE": "1"},
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        why = lines[-1] if lines else f"it ended with status {done.returncode}"
        raise Internal(f"transformers failed: {why}", field="library")
    return [
        LibraryText(**text | {"tokens": tuple(text["tokens"]), "arrivals_s": tuple(text["arrivals_s"])})
        for text in json.loads(done.stdout)
    ]


class _Watch:
    """Counts the target's forward passes and their rows, and notes when tokens come: a forward hook and a streamer."""

    def __init__(self) -> None:
        self.began_s = time.perf_counter()
        self.rows: list[int] = []  # [steps] positions in each forward pass
        self.commits: list[int] = []  # [steps] tokens that each gave
        self.arrivals_s: list[float] = []
        self._prompt_seen = False

    def forward(self, _model: Any, _arguments: Any, keywords: dict[str, Any], _output: Any) -> None:
        """The hook."""
        self.rows.append(int(keywords["input_ids"].shape[-1]))

    def put(self, tokens: Any) -> None:
        """The streamer's half that is called with the prompt first, and then with every commit."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        count = int(tokens.numel())
        self.commits.append(count)
        self.arrivals_s.extend([time.perf_counter() - self.began_s] * count)

    def end(self) -> None:
        """The streamer's other half."""

    def judged(self, prompt_tokens: int) -> tuple[int, int]:
        """Accepted drafts, and drafts judged up to the first wrong one of each step."""
        accepted = questioned = 0
        for step, (rows, commit) in enumerate(zip(self.rows, self.commits, strict=True)):
            drafts = rows - (1 if step else prompt_tokens)
            right = commit - 1
            accepted += right
            # The last step may end at the limit or the end token, before a draft was found wrong.
            questioned += right + (right < drafts and step < len(self.rows) - 1)
        return accepted, questioned


def _texts(request: _Request) -> list[LibraryText]:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if request.threads:
        torch.set_num_threads(request.threads)
    target, assistant = (
        folder
        and AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, request.dtype), use_safetensors=True, trust_remote_code=False
        ).eval()
        for folder in (request.target, request.assistant)
    )
    if request.prompts:
        _text(target, assistant, request, request.prompts[0], WARM_UP_TOKENS)
    return [_text(target, assistant, request, prompt, request.max_tokens) for prompt in request.prompts]


def _text(target: Any, assistant: Any, request: _Request, prompt: tuple[int, ...], max_tokens: int) -> LibraryText:
    import torch

    if request.temperature:
        # A model's own generation_config may truncate or penalise; the target's plain distribution is compared.
        how = {"do_sample": True, "temperature": request.temperature, "top_k": 0, "top_p": 1.0}
    else:
        how = {"do_sample": False}
    torch.manual_seed(request.seed)
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
    accepted, questioned = watch.judged(len(prompt))
    return LibraryText(
        tokens=tuple(generated[0, len(prompt) :].tolist()),
        seconds=seconds,
        arrivals_s=tuple(watch.arrivals_s),
        steps=len(watch.rows),
        accepted=accepted,
        questioned=questioned,
    )


def main() -> None:
    """Answer one request from standard input; whatever the libraries print goes to standard error."""
    request = json.load(sys.stdin)
    prompts = tuple(tuple(prompt) for prompt in request["prompts"])
    with redirect_stdout(sys.stderr):
        texts = _texts(_Request(**request | {"prompts": prompts}))
    json.dump([asdict(text) for text in texts], sys.stdout)


if __name__ == "__main__":
    main()
