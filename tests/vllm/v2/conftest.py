"""Tests of Model Runner V2, whose kernels run in Triton's interpreter on a CPU, so in a process of their own:

TRITON_INTERPRET=1 VLLM_USE_V2_MODEL_RUNNER=1 python -m pytest tests/vllm/v2
"""

from __future__ import annotations

import importlib.util
import os

from interpreter import prepare_interpreter

collect_ignore_glob = ["test_*.py"]

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("vllm"):
    collect_ignore_glob = []
    prepare_interpreter()
