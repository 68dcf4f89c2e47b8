"""llama.cpp, by llama-cpp-python's low-level calls; runs in its own environment (see `child.py`)."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

_BATCH = 512


class LlamaPeer:
    """A model on llama.cpp.

    Attributes:
        version: version of llama-cpp-python, and what the build uses of the processor.
    """

    def __init__(self, model: str, dtype: str, threads: int) -> None:
        """Load `model`: a GGUF file, or a folder of Hugging Face's format that is converted to `dtype` first."""
        self._log = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        with tempfile.TemporaryDirectory(prefix="outrider-gguf-") as folder:
            path = Path(model)
            if path.is_dir():
                if importlib.util.find_spec("gguf") is None:
                    raise ModuleNotFoundError("for the conversion", name="gguf")
                path = Path(folder) / "model.gguf"
                converter = Path(__file__).with_name("gguf_file.py")
                made = subprocess.run(  # noqa: S603 - this interpreter
                    [sys.executable, str(converter), model, str(path), dtype],
                    capture_output=True,
                    text=True,
                    check=False,
                )
                if made.returncode:
                    raise ValueError(made.stderr.strip().split("\n")[-1])
            parameters = llama_cpp.llama_model_default_params()
            parameters.use_mmap = False  # the file goes away
            self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        if not self._model:
            raise ValueError(f"cannot load {model}")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._threads = threads
        self._context: Any = None
        built = llama_cpp.llama_print_system_info().decode().partition("CPU :")[2]
        flags = " ".join(word.split()[0] for word in built.split("|") if word.strip().endswith("= 1"))
        self.version = f"llama-cpp-python {llama_cpp.__version__} ({flags}; KV cache in its default type, float16)"

    def prepare(self, context: list[int], sessions: int, rows: int, logits: int) -> int | None:
        """Read `context`, give it to each session, and repeat steps of `rows` more tokens, with the last `logits`.

        Returns the greedy token after the context; None where it is empty.
        """
        if self._context is not None:
            llama_cpp.llama_free(self._context)
        self._length, self._sessions, self._logits = len(context), sessions, logits
        positions = -(-(self._length + rows) // 256) * 256
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = positions * sessions
        parameters.n_batch = parameters.n_ubatch = max(_BATCH, rows * sessions)
        parameters.n_seq_max = sessions
        parameters.n_threads = parameters.n_threads_batch = self._threads
        self._context = llama_cpp.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise ValueError("has no memory for these sessions")
        token = None
        for first in range(0, self._length, _BATCH):
            (token,) = self._decode([(0, first, context[first : first + _BATCH])], 1)
        memory = llama_cpp.llama_get_memory(self._context)
        for session in range(1, sessions):
            llama_cpp.llama_memory_seq_cp(memory, 0, session, -1, -1)
        block = [token % self._vocab_size for token in range(3, 3 + rows)]
        self._block = [(session, self._length, block) for session in range(sessions)]
        return token

    def step(self) -> list[int]:
        """Compute the rows of all sessions, choose the tokens with the highest logits, and forget the rows."""
        tokens = self._decode(self._block, self._logits)
        memory = llama_cpp.llama_get_memory(self._context)
        for session in range(self._sessions):
            llama_cpp.llama_memory_seq_rm(memory, session, self._length, -1)
        return tokens

    def _decode(self, parts: list[tuple[int, int, list[int]]], logits: int) -> list[int]:
        batch = llama_cpp.llama_batch_init(sum(len(tokens) for _, _, tokens in parts), 0, 1)
        try:
            row = 0
            for session, start, tokens in parts:
                for i, token in enumerate(tokens):
                    batch.token[row], batch.pos[row] = token, start + i
                    batch.n_seq_id[row], batch.seq_id[row][0] = 1, session
                    batch.logits[row] = i >= len(tokens) - logits
                    row += 1
            batch.n_tokens = row
            status = llama_cpp.llama_decode(self._context, batch)
        finally:
            llama_cpp.llama_batch_free(batch)
        if status:
            raise ValueError(f"llama_decode returned {status}")
        count = len(parts) * logits
        pointer = llama_cpp.llama_get_logits(self._context)
        rows = np.ctypeslib.as_array(pointer, shape=(count, self._vocab_size))
        chosen: list[int] = rows.argmax(axis=1).tolist()
        return chosen
