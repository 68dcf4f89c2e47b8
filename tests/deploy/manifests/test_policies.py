"""The manifests as others judge them, `make policies`: Checkov, and the definitions of the custom kinds."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from manifest_documents import (
    KUSTOMIZED,
    NAMESPACE,
    OVERLAYS,
    ROOT,
    Document,
    kustomized,
    named,
    parse,
    with_component,
)
from manifest_pods import pods

CHECKOV = ROOT / ".venv-policies" / "bin" / "checkov"
DEFINITIONS = "OUTRIDER_CRDS"
# KubeRay adds probes to the pods of a Ray cluster; a submitter is a job, which ends.
EXCUSED = {"checkov.io/skip1": "CKV_K8S_8=KubeRay probes", "checkov.io/skip2": "CKV_K8S_9=KubeRay probes"}
CUSTOM = {"RayCluster", "RayJob", "ServiceMonitor", "PodMonitor"}


@pytest.fixture
def rendered(tmp_path) -> dict[str, list[Document]]:
    """Return what Kustomize makes of each folder, and of each overlay with metrics."""
    found = {folder: kustomized(folder) for folder in KUSTOMIZED}
    for folder in OVERLAYS:
        (tmp_path / folder).mkdir(parents=True)
        found[f"{folder} with metrics"] = with_component("components/monitoring", folder, tmp_path / folder)
    return found


def pods_alone(documents: list[Document]) -> list[Document]:
    """Return the pods within Ray's kinds as pods, since Checkov reads no custom kind."""
    made = []
    for pod in pods(documents):
        if pod.where.startswith("Ray"):
            name = pod.where.replace(" ", "-").lower()
            metadata = {"name": name, "namespace": NAMESPACE, "labels": pod.labels, "annotations": EXCUSED}
            made.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod.spec})
    return made


def refused(folder: Path) -> dict[str, set[str]]:
    """Return the policies that each file breaks, as Checkov finds them with the settings of this tree."""
    settings = Path(__file__).with_name("checkov.yaml")
    command = [CHECKOV, "--directory", folder, "--config-file", settings, "--output", "json"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    report = json.loads(run.stdout)
    assert report["summary"]["parsing_errors"] == 0
    found: dict[str, set[str]] = {path.stem: set() for path in folder.iterdir()}
    for check in report["results"]["failed_checks"]:
        found[Path(check["file_path"]).stem].add(f"{check['check_id']} {check['resource']}: {check['check_name']}")
    return found


def test_checkov_finds_nothing_but_what_is_excused_with_a_reason(rendered, tmp_path) -> None:
    if not CHECKOV.exists():
        pytest.skip("needs Checkov, which `make policies` installs")
    folder = tmp_path / "rendered"
    folder.mkdir()
    bad = kustomized("edge")
    (container,) = named(bad, "Deployment")["spec"]["template"]["spec"]["containers"]
    container["securityContext"] = {"privileged": True}
    for name, documents in {**rendered, "bad": bad}.items():
        text = yaml.safe_dump_all([*documents, *pods_alone(documents)])
        (folder / f"{name.replace('/', '-')}.yaml").write_text(text, encoding="utf-8")
    found = refused(folder)
    assert any(complaint.startswith("CKV_K8S_16 ") for complaint in found.pop("bad")), "a privileged pod passes"
    assert {name: complaints for name, complaints in found.items() if complaints} == {}


def strict(schema: Any) -> Any:
    """Return the schema of a definition such that a field that it does not name is refused."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    if made.get("x-kubernetes-int-or-string"):
        made["type"] = ["integer", "string"]
    if "properties" in made and not made.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


def test_custom_kinds_keep_to_the_definitions_that_their_makers_ship(rendered) -> None:
    if not os.environ.get(DEFINITIONS):
        pytest.skip(
            f"needs {DEFINITIONS}, a folder with the CustomResourceDefinitions of KubeRay and Prometheus Operator"
        )
    validators = {}
    for path in Path(os.environ[DEFINITIONS]).glob("*.yaml"):
        (definition,) = parse(path.read_text(encoding="utf-8"))
        for version in definition["spec"]["versions"]:
            kind = (f"{definition['spec']['group']}/{version['name']}", definition["spec"]["names"]["kind"])
            schema = strict(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object"}
            validators[kind] = Draft202012Validator(schema)
    found = [d for documents in rendered.values() for d in documents if d["kind"] in CUSTOM]
    assert {d["kind"] for d in found} == CUSTOM
    for document in found:
        validator = validators[document["apiVersion"], document["kind"]]
        assert [error.message for error in validator.iter_errors(document)] == []
        (document["spec"].get("workerGroupSpecs") or [document["spec"]])[0]["replica"] = 1
        assert [error.message[:21] for error in validator.iter_errors(document)] == ["Additional properties"]
