"""GGUF files as targets: converted once, exactly, and refused by one line that leaves nothing behind."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
import torch
from gguf_files import TEMPLATE, byte_llama, byte_tokenizer, write_gguf
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaForCausalLM

from outrider.cloud.models import gguf_file
from outrider.cloud.models.family_index import chat_template_json, find_target, load_tokenizer, tokenizer_file
from outrider.deploy.cli import main
from outrider.proto.errors import ModelRefused, NotFound, OutriderError, Unavailable

TEXT = "what the theme is: ärger<eos>"


@pytest.fixture(autouse=True)
def targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of converted models."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "outrider" / "targets"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def left(targets: Path) -> list[str]:
    return sorted(path.name for path in targets.glob("*") if path.name != ".lock")


def refused(file: Path, targets: Path, kind: type[OutriderError] = ModelRefused) -> str:
    with pytest.raises(kind) as error:
        find_target(str(file))
    assert (error.value.field, left(targets)) == ("target", [])
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_file_is_loaded_as_the_model_and_the_tokenizer_that_it_was_made_of(file, targets) -> None:
    folder = find_target(str(file))
    weights = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, weight in byte_llama().state_dict().items():
        assert weights[name].dtype == torch.bfloat16
        assert torch.equal(weights[name], weight.bfloat16()), name
    expected = byte_tokenizer().encode(TEXT).ids
    tokenizer = load_tokenizer(folder)
    assert tokenizer(TEXT)["input_ids"] == expected
    assert len(tokenizer) == 261, "transformers adds a token that the model does not have"
    assert tokenizer_file(folder) == Path(folder, "tokenizer.json")
    assert GenerationConfig.from_pretrained(folder).eos_token_id == 1
    template = json.loads(chat_template_json(str(file)))
    assert template == {"chat_template": TEMPLATE, "bos_token": "<bos>", "eos_token": "<eos>"}


@pytest.mark.parametrize("kind", ["F32", "F16", "Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_weights_are_what_the_file_stands_for_in_bfloat16(kind, tmp_path) -> None:
    file = write_gguf(tmp_path / f"{kind}.gguf", kind=kind)
    weights = AutoModelForCausalLM.from_pretrained(find_target(str(file))).state_dict()
    stored = {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(file).tensors
    }
    for name, ours in (("token_embd", "model.embed_tokens"), ("blk.1.ffn_down", "model.layers.1.mlp.down_proj")):
        assert torch.equal(weights[f"{ours}.weight"], torch.tensor(stored[f"{name}.weight"]).bfloat16())


def test_the_same_content_is_converted_once_whatever_its_name(file, targets, tmp_path, monkeypatch) -> None:
    folder = find_target(str(file))
    monkeypatch.setattr(gguf_file, "convert", lambda *_: pytest.fail("converted again"))
    copy = Path(shutil.copy(file, tmp_path / "other.gguf"))
    assert find_target(str(copy)) == find_target(str(file)) == folder
    assert left(targets) == [Path(folder).name]


def test_a_file_with_other_content_under_the_same_name_is_another_model(file, tmp_path) -> None:
    path = Path(shutil.copy(file, tmp_path / "tiny.gguf"))
    first = find_target(str(path))
    write_gguf(path, byte_llama(seed=2))
    assert find_target(str(path)) != first


def test_another_version_of_the_conversion_makes_another_folder(file, monkeypatch) -> None:
    first = find_target(str(file))
    monkeypatch.setattr(gguf_file, "VERSION", gguf_file.VERSION + 1)
    assert find_target(str(file)) != first


def test_a_text_ends_at_the_end_of_a_turn_too(tmp_path) -> None:
    file = write_gguf(tmp_path / "turns.gguf", more={"tokenizer.ggml.eot_token_id": 7})
    assert GenerationConfig.from_pretrained(find_target(str(file))).eos_token_id == [1, 7]


@pytest.mark.parametrize("share", [0.001, 0.01, 0.3, 0.9, 0.9999])
def test_a_file_that_is_cut_off_is_refused(share, file, targets, tmp_path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    assert "cut.gguf cannot be read: it is cut off" in refused(cut, targets)


def test_other_files_are_refused(targets, tmp_path) -> None:
    other = tmp_path / "model.gguf"
    other.write_bytes(b"PK\x03\x04")
    assert "no GGUF file" in refused(other, targets)
    assert "there is no file missing.gguf" in refused(Path("missing.gguf"), targets, NotFound)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ({"architecture": "rwkv6"}, "architecture rwkv6 is not supported"),
        ({"kind": "I32"}, "I32"),
        ({"left_out": "blk.1.ffn_up"}, "lacks model.layers.1.mlp.up_proj.weight"),
        ({"more": {"split.count": 3}}, "llama-gguf-split --merge"),
        ({"more": {"llama.rope.scaling.type": "yarn"}}, "scales its rotation"),
    ],
)
def test_what_transformers_would_not_read_or_leave_out_is_refused(made, why, targets, tmp_path) -> None:
    assert why in refused(write_gguf(tmp_path / "odd.gguf", **made), targets)


def test_a_disk_without_room_is_refused_before_anything_is_written(file, targets, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    assert "make room, or name another folder in XDG_CACHE_HOME" in refused(file, targets, Unavailable)


def test_a_disk_that_fills_up_meanwhile_leaves_nothing(file, targets, monkeypatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", full)
    assert "No space left on device" in refused(file, targets, Unavailable)


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_missing_package_is_named_with_its_command(package, file, targets, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert "pip install --upgrade gguf accelerate" in refused(file, targets)


def test_a_command_says_one_line_and_decodes_as_transformers_does(file, capfd, caplog) -> None:
    prompt = "the weather"
    arguments = ["--json", "--max-tokens", "16", "--dtype", "float32", "--drafter", "ngram"]
    assert main(["run", prompt, "--target", str(file), *arguments]) == 0
    captured = capfd.readouterr()
    assert captured.err == "", "the bars of libraries"
    assert caplog.messages == ["converting tiny.gguf for its first use: 0.2 MB, once"]
    folder = find_target(str(file))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    encoded = load_tokenizer(folder)(prompt, return_tensors="pt")
    generated = model.generate(**encoded, do_sample=False, max_new_tokens=16)[0, encoded["input_ids"].shape[1] :]
    assert json.loads(captured.out)["tokens"] == generated.tolist()
