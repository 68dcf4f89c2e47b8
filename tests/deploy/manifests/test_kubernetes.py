"""The Kubernetes manifests, as written and as Kustomize combines them, agree with the code."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import yaml
from dockerfile_stages import IMAGES
from manifest_checks import (
    commands,
    complaints,
    documented_secrets,
    hardening,
    images,
    known_secrets,
    ports,
    references,
    selectors,
    verifier_ports,
    version,
)
from manifest_documents import (
    KUBERNETES,
    KUSTOMIZED,
    NAMESPACE,
    OVERLAYS,
    ROOT,
    Document,
    kustomized,
    named,
    read,
    with_component,
    written,
)
from manifest_network import OUTSIDE, Peer, reaches
from manifest_pods import environment, pods
from manifest_schemas import KUBERNETES_VERSIONS
from manifest_schemas import complaints as schema_complaints

COORDINATOR_PORT, DECODING_PORT = 50050, 50051
RAY_PORTS = (6379, 8076, 8077, 8265, 10001, 10002, 19999, 52365)
HEAD, WORKER, COORDINATOR, CLIENT, EDGE = (
    {"app.kubernetes.io/part-of": "outrider", "app.kubernetes.io/component": component}
    for component in ("ray-head", "ray-worker", "coordinator", "ray-client", "edge")
)
STRANGER = Peer({"app": "something-else"}, "elsewhere")
KUBERAY = Peer({"app.kubernetes.io/name": "kuberay-operator"}, namespace="kuberay-system")
DNS = Peer({"k8s-app": "kube-dns"}, namespace="kube-system")
FRIEND = Peer(EDGE, "elsewhere", labels_of_namespace={"outrider-edges": "allowed"})


# --- as written ---


def test_kustomizations_name_only_files_that_exist_and_leave_none_out() -> None:
    for kustomization in KUBERNETES.rglob("kustomization.yaml"):
        folder = kustomization.parent
        (document,) = read(kustomization)
        patches = [patch["path"] for patch in document.get("patches", [])]
        named_here = {*document.get("resources", []), *document.get("components", []), *patches}
        assert [name for name in named_here if not (folder / name).exists()] == []
        files = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
        assert files - named_here == set(), f"{folder} has files that its kustomization does not name"


def test_no_secret_stands_in_the_tree() -> None:
    for path in KUBERNETES.rglob("*.yaml"):
        assert [d for d in read(path) if isinstance(d, dict) and d["kind"] == "Secret"] == []
        assert "PRIVATE KEY" not in path.read_text(encoding="utf-8")


# --- as Kustomize combines them ---


@pytest.mark.parametrize("version_of_kubernetes", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("folder", KUSTOMIZED)
def test_what_kustomize_makes_keeps_to_the_published_schemas(folder, version_of_kubernetes) -> None:
    assert [c for d in kustomized(folder) for c in schema_complaints(d, version_of_kubernetes)] == []


@pytest.mark.parametrize("folder", KUSTOMIZED)
def test_what_kustomize_makes_agrees_with_the_code_and_with_itself(folder) -> None:
    assert complaints(kustomized(folder)) == []


@pytest.mark.parametrize("folder", ["base", *OVERLAYS])
def test_metrics_can_be_added_to_every_overlay(folder, tmp_path) -> None:
    documents = with_component("components/monitoring", folder, tmp_path)
    assert {d["metadata"].get("namespace") for d in documents if d["kind"] != "Namespace"} == {NAMESPACE}
    assert complaints(documents) == []
    assert [c for d in documents for c in schema_complaints(d, KUBERNETES_VERSIONS[-1])] == []
    prometheus = Peer({"app.kubernetes.io/name": "prometheus"}, namespace="monitoring")
    assert reaches(documents, prometheus, Peer(COORDINATOR), 9464)
    assert reaches(documents, prometheus, Peer(WORKER), 9465)
    assert not reaches(documents, prometheus, Peer(WORKER), DECODING_PORT) or folder in OVERLAYS
    for port in (9464, 9465, 8080):
        assert not any(reaches(documents, OUTSIDE, Peer(labels), port) for labels in (COORDINATOR, WORKER, HEAD))


@pytest.mark.parametrize("folder", KUSTOMIZED)
def test_everything_is_in_one_namespace_with_tagged_images(folder) -> None:
    for document in kustomized(folder):
        if document["kind"] != "Namespace":
            assert document["metadata"]["namespace"] == NAMESPACE
    for pod in pods(kustomized(folder)):
        assert all(":" in container["image"] for container in pod.containers)


@pytest.mark.parametrize(("overlay", "image", "gpus"), [("gpu", "cuda", "1"), ("vllm", "vllm", "2")])
def test_an_overlay_gives_each_verifier_the_gpus_that_it_asks_for(overlay, image, gpus) -> None:
    documents = kustomized(f"overlays/{overlay}")
    group = named(documents, "RayCluster")["spec"]["workerGroupSpecs"][0]
    resources = group["template"]["spec"]["containers"][0]["resources"]
    (asked,) = (environment(c) for p in pods(documents) if p.where.startswith("CronJob") for c in p.containers)
    assert asked["OUTRIDER_VERIFIER_DEVICE"] == "cuda"
    assert asked.get("OUTRIDER_VERIFIER_TENSOR_PARALLEL", "1") == gpus
    assert (asked.get("OUTRIDER_VERIFIER_ENGINE") == "vllm") == (overlay == "vllm")
    assert resources["limits"]["nvidia.com/gpu"] == resources["requests"]["nvidia.com/gpu"] == gpus
    assert group["rayStartParams"]["num-gpus"] == asked["OUTRIDER_VERIFIER_GPUS"] == gpus
    assert {c["image"] for p in pods(documents) for c in p.containers if p.where.startswith("Ray")} == {
        f"outrider-cloud:{version()}-{image}"
    }


@pytest.mark.parametrize("folder", ["base", *OVERLAYS])
def test_a_worker_has_room_for_one_verifier_and_there_is_one_for_each(folder) -> None:
    documents = kustomized(folder)
    group = named(documents, "RayCluster")["spec"]["workerGroupSpecs"][0]
    (starter,) = (c for p in pods(documents) if p.where.startswith("CronJob") for c in p.containers)
    offered = float(group["rayStartParams"]["num-cpus"])
    assert offered / 2 < float(environment(starter)["OUTRIDER_VERIFIER_CPUS"]) <= offered
    assert float(group["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"]) == offered
    assert int(starter["args"][0]) == group["replicas"] == group["minReplicas"] == group["maxReplicas"]
    assert DECODING_PORT in verifier_ports(documents)


@pytest.mark.parametrize("folder", ["base", "train"])
def test_ray_is_of_the_version_that_the_images_install(folder) -> None:
    pinned = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("ray=="))
    (spec,) = (d["spec"] for d in written(folder) if d["kind"] in ("RayCluster", "RayJob"))
    assert pinned == f"ray=={spec.get('rayClusterSpec', spec)['rayVersion']}"


@pytest.mark.parametrize("folder", ["base", *OVERLAYS])
def test_a_pod_that_goes_has_time_for_what_it_does_before(folder) -> None:
    documents = kustomized(folder)
    (worker,) = (pod for pod in pods(documents) if pod.labels == WORKER)
    (coordinator,) = (pod for pod in pods(documents) if pod.labels == COORDINATOR)
    drain_grace_s = 10  # of `outrider coordinator`, which asks verifiers to drain
    assert worker.spec["terminationGracePeriodSeconds"] >= 2 * drain_grace_s
    slept_s = int(coordinator.containers[0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert coordinator.spec["terminationGracePeriodSeconds"] >= slept_s + 10
    budgets = {d["metadata"]["name"]: d["spec"] for d in documents if d["kind"] == "PodDisruptionBudget"}
    assert budgets["outrider-coordinator"]["minAvailable"] < named(documents, "Deployment")["spec"]["replicas"]


# --- network policies ---


@pytest.mark.parametrize("folder", ["base", *OVERLAYS])
def test_rays_ports_stay_inside(folder) -> None:
    documents = kustomized(folder)
    strangers = (OUTSIDE, STRANGER, Peer(EDGE), Peer(EDGE, "elsewhere"), Peer(HEAD, "elsewhere"))
    for labels, port in itertools.product((HEAD, WORKER, COORDINATOR), RAY_PORTS):
        assert not any(reaches(documents, stranger, Peer(labels), port) for stranger in strangers)
        assert all(reaches(documents, Peer(member), Peer(labels), port) for member in (HEAD, WORKER, COORDINATOR))


@pytest.mark.parametrize("folder", ["base", *OVERLAYS])
def test_jobs_and_kuberay_reach_the_head_and_nothing_else(folder) -> None:
    documents = kustomized(folder)
    assert reaches(documents, Peer(CLIENT), Peer(HEAD), 8265)
    assert reaches(documents, Peer(CLIENT), Peer(HEAD), 10001)
    assert reaches(documents, KUBERAY, Peer(HEAD), 8265)
    assert not reaches(documents, Peer(CLIENT), Peer(HEAD), 6379)
    assert not reaches(documents, KUBERAY, Peer(WORKER), 8076)
    assert not reaches(documents, Peer(KUBERAY.labels, "elsewhere"), Peer(HEAD), 8265), "anybody can take its labels"


def test_inside_the_cluster_only_edges_reach_coordinators_and_verifiers() -> None:
    documents = kustomized("base")
    for target, port in ((COORDINATOR, COORDINATOR_PORT), (WORKER, DECODING_PORT)):
        assert reaches(documents, Peer(EDGE), Peer(target), port)
        assert reaches(documents, FRIEND, Peer(target), port)
        assert not reaches(documents, Peer(EDGE, "elsewhere"), Peer(target), port)
        assert not reaches(documents, OUTSIDE, Peer(target), port)
        assert not reaches(documents, STRANGER, Peer(target), port)


@pytest.mark.parametrize("folder", ["base", *OVERLAYS])
def test_pods_connect_to_each_other_to_names_and_to_models_alone(folder) -> None:
    documents = [*kustomized(folder), *kustomized("edge"), *kustomized("train")]
    elsewhere = ("10.1.2.3", "172.20.0.1", "192.168.0.1", "100.64.0.1", "169.254.169.254", "fd00::1", "fe80::1", "::1")
    everyone = [Peer(pod.labels) for pod in pods(documents)]
    assert len(everyone) >= 7
    for pod in everyone:
        assert all(reaches(documents, pod, DNS, 53, protocol) for protocol in ("TCP", "UDP"))
        assert not any(reaches(documents, pod, Peer(namespace="", address=a), 443) for a in elsewhere)
        assert not any(reaches(documents, pod, to, port) for to in (OUTSIDE, STRANGER, DNS) for port in (22, 80, 6443))
        fetches = pod.labels in (HEAD, WORKER)
        for address in (OUTSIDE.address, "2001:db8::7"):
            assert reaches(documents, pod, Peer(namespace="", address=address), 443) == fetches
    assert not reaches(documents, Peer(EDGE), Peer(HEAD), 8265)


def test_pods_reach_the_edges_that_are_pods_which_reach_the_rest() -> None:
    documents = [*kustomized("base"), *kustomized("edge")]
    (edge,) = (Peer(pod.labels) for pod in pods(documents) if pod.where == "Deployment outrider-edge")
    assert reaches(documents, STRANGER, edge, 8080)
    assert not reaches(documents, OUTSIDE, edge, 8080)
    assert reaches(documents, edge, Peer(COORDINATOR), COORDINATOR_PORT)
    assert reaches(documents, edge, Peer(WORKER), DECODING_PORT)


@pytest.mark.parametrize("folder", ["overlays/cpu", "overlays/gpu", "overlays/vllm"])
def test_directly_edges_anywhere_reach_coordinators_and_decoding_ports(folder) -> None:
    documents = kustomized(folder)
    assert reaches(documents, OUTSIDE, Peer(COORDINATOR), COORDINATOR_PORT)
    assert reaches(documents, OUTSIDE, Peer(WORKER), DECODING_PORT)
    assert not reaches(documents, OUTSIDE, Peer(HEAD), DECODING_PORT)


def test_with_the_relay_only_coordinators_reach_verifiers() -> None:
    documents = kustomized("overlays/relay")
    assert reaches(documents, OUTSIDE, Peer(COORDINATOR), COORDINATOR_PORT)
    assert reaches(documents, Peer(COORDINATOR), Peer(WORKER), DECODING_PORT)
    for source in (OUTSIDE, STRANGER, Peer(EDGE), Peer(EDGE, "elsewhere")):
        assert not reaches(documents, source, Peer(WORKER), DECODING_PORT)


@pytest.mark.parametrize("folder", OVERLAYS)
def test_whatever_is_open_to_the_outside_speaks_tls_and_asks_for_keys(folder) -> None:
    documents = kustomized(folder)
    (coordinator,) = (environment(c) for p in pods(documents) if p.labels == COORDINATOR for c in p.containers)
    (starter,) = (environment(c) for p in pods(documents) if p.where.startswith("CronJob") for c in p.containers)
    assert coordinator["OUTRIDER_COORDINATOR_INSECURE_LISTEN"] == "false"
    assert coordinator["OUTRIDER_COORDINATOR_API_KEYS"] == "/etc/outrider/api-keys/keys.toml"
    assert starter["OUTRIDER_VERIFIER_INSECURE_LISTEN"] == "false"
    assert starter["OUTRIDER_VERIFIER_TLS_CERT"] == coordinator["OUTRIDER_COORDINATOR_TLS_CERT"]


@pytest.mark.parametrize("folder", ["base", *OVERLAYS])
def test_no_other_pod_may_drain_verifiers_where_no_keys_guard_the_coordinator(folder) -> None:
    documents = kustomized(folder)
    (coordinator,) = (environment(c) for p in pods(documents) if p.labels == COORDINATOR for c in p.containers)
    drains = coordinator.get("OUTRIDER_COORDINATOR_REMOTE_DRAIN", "false")
    assert drains == "false" or "OUTRIDER_COORDINATOR_API_KEYS" in coordinator
    (worker,) = (c for p in pods(documents) if p.labels == WORKER for c in p.containers)
    assert worker["lifecycle"]["preStop"]["exec"]["command"] == ["outrider-drain-here"], "it asks Ray"


# --- negative controls: each check must find its fault ---


def _coordinator(documents: list[Document]) -> Document:
    (container,) = named(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    return container


def _worker(documents: list[Document]) -> Document:
    spec = named(documents, "RayCluster")["spec"]["workerGroupSpecs"][0]["template"]["spec"]
    return spec["containers"][0]


def _starter(documents: list[Document]) -> Document:
    spec = named(documents, "CronJob")["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    return spec["containers"][0]


def _set(container: Document, name: str, value: str) -> None:
    container["env"] = [entry for entry in container["env"] if entry["name"] != name] + [{"name": name, "value": value}]


def _pod(documents: list[Document]) -> Document:
    spec: Document = named(documents, "Deployment")["spec"]["template"]["spec"]
    return spec


def _select_nobody(document: Document) -> None:
    document["spec"]["selector"]["matchLabels"]["app"] = "other"


# Each check, and by the complaint the mistakes that it must find.
BROKEN: dict[Callable[[list[Document]], Iterable[str]], dict[str, Callable[[list[Document]], object]]] = {
    commands: {
        "unrecognized arguments": lambda d: _coordinator(d)["args"].append("--listen-on=0.0.0.0:1"),
        "'many' is not a number": lambda d: _set(_starter(d), "OUTRIDER_VERIFIER_CPUS", "many"),
        "COORDINATOR_SECRET is no option": lambda d: _set(_coordinator(d), "OUTRIDER_COORDINATOR_SECRET", "x"),
        "outrider-x is not in the image coordinator": lambda d: _coordinator(d).update(command=["outrider-x"]),
        "verifier would refuse to listen on 0.0.0.0:50051": (
            lambda d: _set(_starter(d), "OUTRIDER_VERIFIER_INSECURE_LISTEN", "false")
        ),
    },
    ports: {
        "port 50060 is declared, and nobody listens": lambda d: _coordinator(d)["ports"][0].update(containerPort=50060),
        "port 50052 is not declared": lambda d: _set(_starter(d), "OUTRIDER_VERIFIER_LISTEN", "0.0.0.0:50052"),
        "readinessProbe asks port 50051, and nobody listens": (
            lambda d: _coordinator(d)["readinessProbe"].update(grpc={"port": 50051})
        ),
        "Service outrider-coordinator: nothing has port http": (
            lambda d: named(d, "Service")["spec"]["ports"][0].update(targetPort="http")
        ),
        "NetworkPolicy edges-to-verifiers: nothing has port 1": (
            lambda d: named(d, "NetworkPolicy", "edges-to-verifiers")["spec"]["ingress"][0].update(ports=[{"port": 1}])
        ),
        "NetworkPolicy ray-clients: nothing has port 1": (
            lambda d: named(d, "NetworkPolicy", "ray-clients")["spec"]["egress"][0].update(ports=[{"port": 1}])
        ),
    },
    references: {
        "nobody makes the Secret x": lambda d: _pod(d)["volumes"][0].update(secret={"secretName": "x"}),
        "has no file /etc/outrider/lease/key": (
            lambda d: _set(_starter(d), "OUTRIDER_VERIFIER_LEASE_SECRET_FILE", "/etc/outrider/lease/key")
        ),
        "RayCluster outrider verifiers: has no file /etc/outrider/tls/tls.crt": (
            lambda d: _set(_starter(d), "OUTRIDER_VERIFIER_TLS_CERT", "/etc/outrider/tls/tls.crt")
        ),
        "has no file /etc/outrider/ray/auth_token": lambda d: named(d, "RayCluster")["spec"].pop("authOptions"),
        "nobody makes the ServiceAccount root": lambda d: _pod(d).update(serviceAccountName="root"),
        "has no volume disk": lambda d: _worker(d)["volumeMounts"].append({"name": "disk", "mountPath": "/disk"}),
    },
    selectors: {
        "does not select its own pods": lambda d: _select_nobody(named(d, "Deployment")),
        "PodDisruptionBudget outrider-verifiers: selects no pod": (
            lambda d: _select_nobody(named(d, "PodDisruptionBudget", "outrider-verifiers"))
        ),
    },
    images: {"no Dockerfile makes rayproject/ray:2.60.0": lambda d: _worker(d).update(image="rayproject/ray:2.60.0")},
    hardening: {
        "readOnlyRootFilesystem is not True": (
            lambda d: _worker(d)["securityContext"].update(readOnlyRootFilesystem=False)
        ),
        "gets variables of Services": lambda d: _pod(d).pop("enableServiceLinks"),
        "has no limits of cpu, memory": lambda d: _worker(d)["resources"].pop("limits"),
    },
}


@pytest.mark.parametrize(("check", "complaint"), [(check, each) for check, known in BROKEN.items() for each in known])
def test_a_mistake_is_seen(check, complaint) -> None:
    documents = copy.deepcopy(written("base"))
    assert list(check(documents)) == []
    BROKEN[check][complaint](documents)
    assert any(complaint in seen for seen in check(documents)), list(check(documents))


UNKNOWN_FIELDS: dict[str, Callable[[list[Document]], object]] = {
    "of a pod": lambda d: named(d, "Deployment")["spec"]["template"]["spec"].update(hostname2="x"),
    "of a pod within a RayCluster": lambda d: _worker(d).update(commands=["x"]),
    "of a RayCluster": lambda d: named(d, "RayCluster")["spec"].update(workers=[]),
    "of a policy": lambda d: named(d, "NetworkPolicy", "nothing")["spec"].update(policyType=["Ingress"]),
    "of a CronJob, of the wrong type": lambda d: named(d, "CronJob")["spec"].update(startingDeadlineSeconds="soon"),
    "of a PodDisruptionBudget": lambda d: named(d, "PodDisruptionBudget", "outrider-verifiers")["spec"].update(max=1),
}


@pytest.mark.parametrize("where", UNKNOWN_FIELDS)
def test_an_unknown_field_is_seen(where) -> None:
    documents = copy.deepcopy(written("base"))
    UNKNOWN_FIELDS[where](documents)
    assert [c for d in documents for c in schema_complaints(d, KUBERNETES_VERSIONS[-1])] != []


def test_a_policy_that_opens_too_much_is_seen() -> None:
    documents = copy.deepcopy(written("base"))
    named(documents, "NetworkPolicy", "ray-among-itself")["spec"]["ingress"] = [{}]
    assert reaches(documents, STRANGER, Peer(HEAD), 6379)
    without_default = [d for d in documents if d["metadata"]["name"] not in ("nothing", "ray-clients-to-head")]
    named(without_default, "NetworkPolicy", "ray-among-itself")["spec"]["podSelector"] = {"matchLabels": {"a": "b"}}
    assert reaches(without_default, OUTSIDE, Peer(HEAD), 10001)
    named(documents, "NetworkPolicy", "ray-to-models")["spec"]["egress"][0]["to"][0]["ipBlock"].pop("except")
    assert reaches(documents, Peer(WORKER), Peer(namespace="", address="169.254.169.254"), 443)


def test_the_readme_documents_every_secret_that_the_overlays_need() -> None:
    assert set(documented_secrets()) == {"outrider-lease", "outrider-tls", "outrider-api-keys"}
    assert known_secrets(written("base"))["outrider"] == {"auth_token"}
    assert set(IMAGES) == {"edge", "coordinator", "cloud"}


def test_yaml_files_have_no_key_twice() -> None:
    class Strict(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
            keys = [key.value for key, _ in node.value if key.value != "<<"]
            assert len(keys) == len(set(keys)), f"{node.start_mark}: {keys}"
            return super().construct_mapping(node, deep)

    files: list[Path] = [*(ROOT / "deploy").rglob("*.yaml")]
    assert len(files) > 20
    for path in files:
        list(yaml.load_all(path.read_text(encoding="utf-8"), Strict))
