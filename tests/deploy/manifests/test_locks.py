"""Images install what their locks name and nothing else; an SBOM lists the same."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess

import pytest
from dockerfile_stages import DOCKERFILE, IMAGES, extras, stages
from image_locks import LOCKS, OF_IMAGE, PYPROJECT, Pin, complaints, pins
from manifest_checks import version
from manifest_documents import ROOT

STAGES = stages(DOCKERFILE.read_text(encoding="utf-8"))
CONSTRAINED = {
    pin.name: pin.version
    for pin in pins(re.sub(r"^#.*\n", "", (ROOT / "constraints.txt").read_text(encoding="utf-8"), flags=re.MULTILINE))
}


def lock_of(image: str) -> list[Pin]:
    return [pin for name in OF_IMAGE[image] for pin in pins((LOCKS / f"{name}.txt").read_text(encoding="utf-8"))]


def wanted_of(image: str) -> list[str]:
    chosen = sorted(extras(STAGES, image.partition(",")[0]))
    own = PYPROJECT["project"]
    asked = [*own["dependencies"], *(r for extra in chosen for r in own["optional-dependencies"][extra])]
    return [f"outrider[{','.join(chosen)}]", *asked]


@pytest.mark.parametrize("image", OF_IMAGE)
def test_a_lock_has_all_that_its_image_needs_by_version_and_hash(image) -> None:
    locked = lock_of(image)
    assert complaints(locked, wanted_of(image), CONSTRAINED) == []
    assert len(locked) > 20


def test_the_wheel_is_built_with_locked_tools() -> None:
    locked = pins((LOCKS / "wheel.txt").read_text(encoding="utf-8"))
    assert complaints(locked, ["build", *PYPROJECT["build-system"]["requires"]], CONSTRAINED) == []


def test_uv_fetches_torch_where_pip_finds_none_and_is_locked_too() -> None:
    """Its index is uv's to know, so that no host stands here; it needs the hashes of the lock all the same."""
    assert complaints(pins((LOCKS / "uv.txt").read_text(encoding="utf-8")), ["uv"], CONSTRAINED) == []
    (fetched,) = (run for run in STAGES["cloud-environment"].all("RUN") if "--torch-backend cpu" in run)
    first, then = fetched.split("||")
    assert "pip install" in first
    assert "uv pip install" in then
    assert all("--require-hashes" in part and "torch-${TORCH}.txt" in part for part in (first, then))


def test_the_images_differ_in_torchs_build_alone() -> None:
    cpu, cuda = (
        {pin.name: pin for pin in pins((LOCKS / f"torch-{build}.txt").read_text(encoding="utf-8"))}
        for build in ("cpu", "cuda")
    )
    assert cpu["torch"].version == f"{cuda['torch'].version}+cpu"
    assert cpu.keys() < cuda.keys()
    assert not [name for name in cpu if name.startswith(("nvidia", "cuda", "triton"))]
    assert "torch" not in {pin.name for pin in pins((LOCKS / "cloud.txt").read_text(encoding="utf-8"))}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda locked: [pin for pin in locked if pin.name != "onnxruntime"], "onnxruntime is missing"),
        (lambda locked: [pin for pin in locked if pin.name != "markupsafe"], "markupsafe is missing"),
        (lambda locked: [Pin(p.name, p.version, ()) if p.name == "rich" else p for p in locked], "rich has no hash"),
        (
            lambda locked: [Pin(p.name, "0.0.1", p.hashes) if p.name == "numpy" else p for p in locked],
            "numpy is 0.0.1, constraints.txt has",
        ),
        (
            lambda locked: [Pin(p.name, "0.1", p.hashes) if p.name == "cryptography" else p for p in locked],
            "cryptography is 0.1, not >=",
        ),
    ],
)
def test_a_lock_that_lags_behind_is_found(change, complaint) -> None:
    """These are the controls: each is a lock with one defect."""
    found = complaints(change(lock_of("edge")), wanted_of("edge"), CONSTRAINED)
    assert [text for text in found if text.startswith(complaint)]


@pytest.mark.parametrize("line", ["rich", "rich>=13 --hash=sha256:" + "0" * 64, "-e .", "https://example.org/x.whl"])
def test_a_line_that_pins_nothing_is_no_lock(line) -> None:
    with pytest.raises(ValueError, match="no pinned package"):
        pins(line)


@pytest.mark.parametrize("stage", ["wheel", *(f"{image}-environment" for image in IMAGES)])
def test_every_install_is_of_a_lock_or_of_the_wheel(stage) -> None:
    """Only vLLM, which has its own build argument, brings packages that no lock names."""
    installs = [part for run in STAGES[stage].all("RUN") for part in run.split(" && ") if "pip install" in part]
    assert installs
    for install in installs:
        if "${VLLM}" in install:
            continue
        assert "--no-deps" in install
        lock = re.search(r"--require-hashes .*--requirement \"?/tmp/(?:locks/)?([\w${}-]+)\.txt", install)
        assert lock or "/dist/outrider-*.whl" in install, install
        if lock:
            assert (LOCKS / f"{lock[1].replace('${TORCH}', 'cpu')}.txt").is_file()


def test_the_sbom_of_an_image_lists_its_locks() -> None:
    image = "cloud"  # the one with two locks
    path = os.pathsep.join([str(ROOT / ".venv-supply" / "bin"), os.environ["PATH"]])
    if shutil.which("cyclonedx-py", path=path) is None:
        pytest.skip("needs cyclonedx-py, which `make sbom` installs")
    run = subprocess.run(
        [ROOT / "deploy" / "docker" / "sbom.sh", image],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "PATH": path},
    )
    document = json.loads(run.stdout)
    assert document["bomFormat"] == "CycloneDX"
    assert [document["metadata"]["component"][key] for key in ("name", "version")] == ["outrider", version()]
    listed = {
        (c["name"].lower().replace("_", "-"), c["version"]): c["externalReferences"] for c in document["components"]
    }
    assert listed.keys() == {(pin.name, pin.version) for pin in lock_of(image)}
    for pin in lock_of(image):
        hashes = {h["content"] for source in listed[pin.name, pin.version] for h in source.get("hashes", [])}
        assert hashes == {text.rpartition(":")[2] for text in pin.hashes}
