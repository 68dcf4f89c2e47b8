"""Pods of documents of any kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from manifest_documents import Document


@dataclass(frozen=True)
class Pod:
    """A pod template. `where` is for people, such as `Deployment outrider-coordinator`."""

    where: str
    labels: Mapping[str, str]
    spec: Document

    @property
    def containers(self) -> list[Document]:
        """All containers, including init containers."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def ports(self) -> dict[int, str]:
        """Names of the declared ports, by number."""
        return {port["containerPort"]: port.get("name", "") for c in self.containers for port in c.get("ports", [])}


def pods(documents: list[Document]) -> list[Pod]:
    """Return the pods of all documents."""
    return [pod for document in documents for pod in _pods_of(document)]


def _pods_of(document: Document) -> Iterator[Pod]:
    where = f"{document['kind']} {document['metadata']['name']}"
    spec = document.get("spec", {})
    if document["kind"] == "CronJob":
        spec = spec["jobTemplate"]["spec"]
    if document["kind"] == "RayJob":
        yield _pod(f"{where} submitter", spec["submitterPodTemplate"])
        spec = spec["rayClusterSpec"]
    if document["kind"] in ("Deployment", "DaemonSet", "CronJob", "Job"):
        yield _pod(where, spec["template"])
    elif document["kind"] in ("RayCluster", "RayJob"):
        yield _pod(f"{where} head", spec["headGroupSpec"]["template"])
        for group in spec.get("workerGroupSpecs", []):
            yield _pod(f"{where} {group['groupName']}", group["template"])


def _pod(where: str, template: Document) -> Pod:
    return Pod(where, template["metadata"]["labels"], template["spec"])


def environment(container: Document) -> dict[str, str]:
    """Return the environment of a container; values from elsewhere are empty."""
    return {entry["name"]: entry.get("value", "") for entry in container.get("env", [])}


def selects(selector: Document, labels: Mapping[str, str]) -> bool:
    """Return whether a label selector (`matchLabels`, `matchExpressions`) matches; an empty one matches all."""
    unknown = set(selector) - {"matchLabels", "matchExpressions"}
    assert not unknown, f"a label selector has no {unknown}"
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        _holds(expression, labels) for expression in selector.get("matchExpressions", [])
    )


def _holds(expression: Document, labels: Mapping[str, Any]) -> bool:
    key, values = expression["key"], expression.get("values", [])
    match expression["operator"]:
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
    raise AssertionError(f"{expression['operator']} is no operator")
