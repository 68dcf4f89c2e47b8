"""`research/systems/whole_drafter.py`: the model that it writes says what the trimmed drafter says."""

from __future__ import annotations

import runpy

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from outrider.cloud.models.heads import reduce_vocabulary


def test_a_trimmed_drafter_written_whole_says_the_same_of_the_tokens_that_it_knows(root, tmp_path) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=24, tie_word_embeddings=True, **shape)).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_()  # so that logits differ by more than bfloat16 rounds
    known = torch.tensor([1, 2, 5, 8, 13, 21])
    reduce_vocabulary(model, known)
    model.save_pretrained(tmp_path / "drafter")
    (tmp_path / "model").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_text("{}")
    script = runpy.run_path(str(root / "research/systems/whole_drafter.py"), run_name="whole_drafter")
    script["whole"](tmp_path / "drafter", tmp_path / "model", tmp_path / "whole")

    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype="float32").eval()
    text = torch.tensor([[1, 5, 21, 2, 7, 13]])  # it does not know 7
    with torch.inference_mode():
        trimmed, written = model(text).logits, whole(text).logits
    assert trimmed[..., known].std() > 1
    assert torch.allclose(trimmed[..., known], written[..., known], atol=0.1)
    others = [token for token in range(24) if token not in known]
    assert not written[..., others].any()
    assert (tmp_path / "whole/tokenizer.json").is_file()
