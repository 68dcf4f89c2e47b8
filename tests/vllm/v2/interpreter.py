"""vLLM's Triton kernels on a machine without a GPU."""

from __future__ import annotations

import types


def prepare_interpreter() -> None:
    """Let vLLM run its kernels in Triton's interpreter; TRITON_INTERPRET=1 is set, and Triton not yet imported."""
    import triton.backends

    # vLLM wants a driver for this platform, which the interpreter does not need.
    driver = types.SimpleNamespace(is_active=lambda: False)
    triton.backends.backends["cpu"] = types.SimpleNamespace(driver=driver)

    import vllm.v1.worker.cpu.shm  # noqa: F401 - stands in for what torch has with CUDA alone
