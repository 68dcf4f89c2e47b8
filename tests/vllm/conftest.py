"""Tests against an installed vLLM, which `make vllm` runs in an environment of its own; elsewhere none is collected."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
