"""Published schemas: Kubernetes's own by `kubernetes-validate`, and what KubeRay and the Prometheus Operator take.

The custom kinds have no package that carries their schemas. Their fields below are those that our documents may use,
after the published API references (KubeRay 1.7 `ray.io/v1`, Prometheus Operator `monitoring.coreos.com/v1`); a field
that is not listed is refused, and the pods within are held against Kubernetes's own schema. `test_policies.py` takes
the definitions themselves where a folder has them.
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from manifest_documents import Document
from referencing import Registry, Resource

# The oldest version that the README promises, and the newest that the package knows.
KUBERNETES_VERSIONS = ("1.29.0", "1.37.0")

Schema = dict[str, Any]


def complaints(document: Document, version: str) -> list[str]:
    """Return what Kubernetes of this version would refuse; empty: nothing."""
    validator = _validator(document["apiVersion"], document["kind"], version)
    name = f"{document['kind']} {document['metadata']['name']}"
    return [
        f"{name}: {'.'.join(map(str, error.absolute_path))}: {error.message}"
        for error in validator.iter_errors(document)
    ]


@functools.cache
def _validator(api_version: str, kind: str, version: str) -> Draft202012Validator:
    own = OWN_SCHEMAS.get((api_version, kind))
    schema = own if own is not None else _published(api_version, kind, version)
    return Draft202012Validator(schema, registry=_definitions(version))


@functools.cache
def _definitions(version: str) -> Registry[Schema]:
    return Resource.from_contents(_load(version, "_definitions.json")) @ Registry()


def _published(api_version: str, kind: str, version: str) -> Schema:
    group, _, number = api_version.rpartition("/")
    suffix = f"{group.split('.')[0]}-{number}" if group else number
    return _load(version, f"{kind.lower()}-{suffix}.json")


@functools.cache
def _load(version: str, name: str) -> Schema:
    package = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate: pip install --group dev")
    folder = resources.files(package) / "kubernetes-json-schema" / f"v{version}-local-strict"
    schema: Schema = json.loads((folder / name).read_text(encoding="utf-8"))
    return schema


def _kubernetes(name: str) -> Schema:
    return {"$ref": f"https://kubernetes.io/api/_definitions.json#/$defs/io.k8s.{name}"}


def _fields(required: list[str], **properties: Schema) -> Schema:
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


def _list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _kind(api_version: str, kind: str, spec: Schema) -> Schema:
    return _fields(
        ["apiVersion", "kind", "metadata", "spec"],
        apiVersion={"const": api_version},
        kind={"const": kind},
        metadata=_kubernetes("apimachinery.pkg.apis.meta.v1.ObjectMeta"),
        spec=spec,
    )


STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
BOOLEAN: Schema = {"type": "boolean"}
STRINGS: Schema = {"type": "object", "additionalProperties": STRING}
DURATION: Schema = {"type": "string", "pattern": r"^(\d+(ms|s|m|h))+$"}
POD = _kubernetes("api.core.v1.PodTemplateSpec")
SELECTOR = _kubernetes("apimachinery.pkg.apis.meta.v1.LabelSelector")

RAY_CLUSTER = _fields(
    ["headGroupSpec"],
    rayVersion=STRING,
    authOptions=_fields([], mode={"enum": ["disabled", "token"]}),
    enableInTreeAutoscaling=BOOLEAN,
    suspend=BOOLEAN,
    headGroupSpec=_fields(
        ["template"],
        serviceType={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
        rayStartParams=STRINGS,
        template=POD,
    ),
    workerGroupSpecs=_list_of(
        _fields(
            ["groupName", "template"],
            groupName=STRING,
            replicas=INTEGER,
            minReplicas=INTEGER,
            maxReplicas=INTEGER,
            rayStartParams=STRINGS,
            template=POD,
        )
    ),
)
RAY_JOB = _fields(
    [],
    entrypoint=STRING,
    runtimeEnvYAML=STRING,
    submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
    backoffLimit=INTEGER,
    activeDeadlineSeconds=INTEGER,
    shutdownAfterJobFinishes=BOOLEAN,
    ttlSecondsAfterFinished=INTEGER,
    clusterSelector=STRINGS,
    submitterPodTemplate=POD,
    rayClusterSpec=RAY_CLUSTER,
)
ENDPOINT = _fields(["port"], port=STRING, path=STRING, interval=DURATION, scrapeTimeout=DURATION, scheme=STRING)
OWN_SCHEMAS = {
    ("ray.io/v1", "RayCluster"): _kind("ray.io/v1", "RayCluster", RAY_CLUSTER),
    ("ray.io/v1", "RayJob"): _kind("ray.io/v1", "RayJob", RAY_JOB),
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _kind(
        "monitoring.coreos.com/v1",
        "ServiceMonitor",
        _fields(["endpoints", "selector"], endpoints=_list_of(ENDPOINT), selector=SELECTOR),
    ),
    ("monitoring.coreos.com/v1", "PodMonitor"): _kind(
        "monitoring.coreos.com/v1",
        "PodMonitor",
        _fields(["podMetricsEndpoints", "selector"], podMetricsEndpoints=_list_of(ENDPOINT), selector=SELECTOR),
    ),
}
