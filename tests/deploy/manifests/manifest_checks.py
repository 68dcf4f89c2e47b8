"""Checks of a set of Kubernetes documents beyond their schema, each of which returns complaints."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping

from dockerfile_stages import DOCKERFILE, IMAGES, exec_form, setting, stages
from manifest_commands import RAY_HEAD_PORTS, RAY_WORKER_PORTS, Reading, ports_of, read_command, unknown_names
from manifest_documents import ROOT, Document, written
from manifest_pods import Pod, environment, pods, selects

PLAIN_USER = 10001
COMPONENT = "app.kubernetes.io/component"
CREATED = re.compile(r"kubectl -n outrider create secret generic (\S+)((?: --from-\S+=(?:\"[^\"]*\"|\S+))+)")


def image_of(container: Document) -> str:
    """Return the name of one of our images: edge, coordinator or cloud."""
    return str(container["image"]).rpartition("/")[2].partition(":")[0].removeprefix("outrider-")


def version() -> str:
    """Return the newest release, whose images the manifests name."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    return re.findall(r"^## \[(\d+\.\d+\.\d+)\]", changelog, re.MULTILINE)[0]


def images(documents: list[Document]) -> Iterator[str]:
    """Check that the Dockerfile makes every image, in this version; documents as written have no tags yet."""
    for pod in pods(documents):
        for container in pod.containers:
            tag = container["image"].rpartition(":")[2] if ":" in container["image"] else version()
            if image_of(container) not in IMAGES or tag not in {version(), f"{version()}-cuda", f"{version()}-vllm"}:
                yield f"{pod.where}: no Dockerfile makes {container['image']}"


def readings(documents: list[Document]) -> Iterator[tuple[Pod, Document, Reading]]:
    """Yield every command line of containers, probes, hooks and Ray jobs, with the container's environment."""
    all_stages = stages(DOCKERFILE.read_text(encoding="utf-8"))
    for pod in pods(documents):
        for container in pod.containers:
            if not _started_by_kuberay(pod):
                entry = container.get("command") or exec_form(setting(all_stages, image_of(container), "ENTRYPOINT"))
                yield pod, container, _read([*entry, *container.get("args", [])], container)
            for words in _words(container):
                yield pod, container, _read(words, container)
    for document in documents:
        if document["kind"] == "RayJob":
            head = next(pod for pod in pods([document]) if pod.where.endswith("head"))
            yield head, head.containers[0], _read(shlex.split(document["spec"]["entrypoint"]), head.containers[0])


def _read(words: list[str], container: Document) -> Reading:
    return read_command(words, environment(container), image_of(container))


def _started_by_kuberay(pod: Pod) -> bool:
    return pod.where.startswith("Ray")


def _words(container: Document) -> Iterator[list[str]]:
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        if "exec" in container.get(name, {}):
            yield container[name]["exec"]["command"]
    for hook in container.get("lifecycle", {}).values():
        yield hook["exec"]["command"]


def commands(documents: list[Document]) -> Iterator[str]:
    """Check that every program is in the image, and takes the options and environment variables given to it."""
    by_container: dict[tuple[str, str], list[Reading]] = {}
    found = {}
    for pod, container, reading in readings(documents):
        by_container.setdefault((pod.where, container["name"]), []).append(reading)
        found[pod.where, container["name"]] = environment(container)
        yield from (f"{pod.where}: {complaint}" for complaint in reading.complaints)
    for key, own in by_container.items():
        yield from (f"{key[0]}: {complaint}" for complaint in unknown_names(found[key], own))


def verifier_ports(documents: list[Document]) -> set[int]:
    """Return the ports of the verifiers that the documents start in Ray."""
    started = [o for _, _, r in readings(documents) for o in r.outrider if o.command == "verifier" and o.ray_address]
    return {port for options in started for port in ports_of(options)}


def listened_ports(documents: list[Document], pod: Pod) -> set[int]:
    """Return the ports on which the programs of a pod listen."""
    if pod.labels.get(COMPONENT) == "ray-head":
        return RAY_HEAD_PORTS
    if pod.labels.get(COMPONENT) == "ray-worker":
        return RAY_WORKER_PORTS | verifier_ports(documents)
    return {port for other, _, reading in readings(documents) if other == pod for port in reading.listening()}


def ports(documents: list[Document]) -> Iterator[str]:
    """Check that declared ports are those that programs listen on, and that every named port is one of them."""
    everyone = pods(documents)
    for pod in everyone:
        listened = listened_ports(documents, pod)
        # Ray's head declares only the ports that others connect to.
        undeclared = set() if pod.labels.get(COMPONENT) == "ray-head" else listened - set(pod.ports)
        yield from (f"{pod.where}: port {port} is not declared" for port in sorted(undeclared))
        yield from (f"{pod.where}: port {p} is declared, and nobody listens" for p in sorted(set(pod.ports) - listened))
        for container in pod.containers:
            yield from _probed_ports(pod, container, listened)
    for document in documents:
        yield from _named_ports(document, documents, everyone)


def _probed_ports(pod: Pod, container: Document, listened: set[int]) -> Iterator[str]:
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container.get(name, {})
        numbers = [probe["grpc"]["port"]] if "grpc" in probe else []
        if "httpGet" in probe:
            port = probe["httpGet"]["port"]
            numbers += [number for number, name in pod.ports.items() if port in (number, name)] or [port]
        if "exec" in probe:
            numbers += [
                int(of.rpartition(":")[2].partition("/")[0])
                for of in _read(probe["exec"]["command"], container).health_of
            ]
        yield from (f"{pod.where}: {name} asks port {n}, and nobody listens" for n in numbers if n not in listened)


def _named_ports(document: Document, documents: list[Document], everyone: list[Pod]) -> Iterator[str]:
    """Yield complaints about ports of a Service, policy or monitor that no selected pod has."""
    spec = document.get("spec", {})
    match document["kind"]:
        case "Service":
            wanted = [entry.get("targetPort", entry["port"]) for entry in spec["ports"]]
            there = _ports_of(everyone, {"matchLabels": spec["selector"]})
        case "NetworkPolicy":
            wanted = [entry["port"] for rule in spec.get("ingress", []) for entry in rule.get("ports", [])]
            there = _ports_of(everyone, spec["podSelector"])
            for rule in spec.get("egress", []):
                targets = [to["podSelector"] for to in rule["to"] if "podSelector" in to]
                if targets:
                    wanted += [entry["port"] for entry in rule.get("ports", [])]
                    there = there.union(*(_ports_of(everyone, selector) for selector in targets))
        case "PodMonitor":
            wanted = [entry["port"] for entry in spec["podMetricsEndpoints"]]
            there = _ports_of(everyone, spec["selector"])
        case "ServiceMonitor":
            wanted = [entry["port"] for entry in spec["endpoints"]]
            services = [d for d in documents if d["kind"] == "Service"]
            chosen = [s for s in services if selects(spec["selector"], s["metadata"].get("labels", {}))]
            there = {entry["name"] for service in chosen for entry in service["spec"]["ports"]}
        case _:
            return
    name = f"{document['kind']} {document['metadata']['name']}"
    yield from (f"{name}: nothing has port {port}" for port in wanted if port not in there)


def _ports_of(everyone: list[Pod], selector: Document) -> set[int | str]:
    """Return numbers and names of the ports of selected pods."""
    chosen = [pod for pod in everyone if selects(selector, pod.labels)]
    return {port for pod in chosen for port in [*pod.ports, *pod.ports.values()]}


def selectors(documents: list[Document]) -> Iterator[str]:
    """Check that every selector selects a pod, and a Deployment's its own."""
    everyone = pods(documents)
    for document in documents:
        where, spec = f"{document['kind']} {document['metadata']['name']}", document.get("spec", {})
        makes_pods = document["kind"] in ("Deployment", "DaemonSet")
        if makes_pods and not selects(spec["selector"], spec["template"]["metadata"]["labels"]):
            yield f"{where}: does not select its own pods"
        wanted = {
            "Service": {"matchLabels": spec.get("selector")},
            "PodDisruptionBudget": spec.get("selector"),
            "NetworkPolicy": spec.get("podSelector"),
            "PodMonitor": spec.get("selector"),
        }.get(document["kind"])
        if wanted is not None and not any(selects(wanted, pod.labels) for pod in everyone):
            yield f"{where}: selects no pod"
    for pod in everyone:
        for constraint in pod.spec.get("topologySpreadConstraints", []):
            if not selects(constraint["labelSelector"], pod.labels):
                yield f"{pod.where}: is not among those that it is spread with"


def documented_secrets() -> dict[str, set[str]]:
    """Return names and keys of the secrets that docs/kubernetes.md creates."""
    text = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    return {
        name: {option.partition("=")[2].partition("=")[0] for option in shlex.split(options)}
        for name, options in CREATED.findall(text)
    }


def known_secrets(documents: list[Document]) -> dict[str, set[str]]:
    """Return all secrets: documented ones, those of the documents, and KubeRay's for clusters with a token."""
    made = {
        d["metadata"]["name"]: {*d.get("data", {}), *d.get("stringData", {})}
        for d in documents
        if d["kind"] == "Secret"
    }
    by_kuberay = {
        d["metadata"]["name"]: {"auth_token"}
        for d in documents
        if d["kind"] == "RayCluster" and d["spec"].get("authOptions", {}).get("mode") == "token"
    }
    return {**documented_secrets(), **made, **by_kuberay}


def references(documents: list[Document]) -> Iterator[str]:
    """Check that every Secret, ConfigMap, claim, volume, account and file exists that is referred to."""
    secrets = known_secrets(documents)
    maps = {d["metadata"]["name"]: set(d.get("data", {})) for d in documents if d["kind"] == "ConfigMap"}
    claims = {d["metadata"]["name"] for d in documents if d["kind"] == "PersistentVolumeClaim"}
    accounts = {d["metadata"]["name"] for d in [*documents, *written("base")] if d["kind"] == "ServiceAccount"}
    for pod in pods(documents):
        if pod.spec.get("serviceAccountName", "default") not in {"default", *accounts}:
            yield f"{pod.where}: nobody makes the ServiceAccount {pod.spec['serviceAccountName']}"
        volumes = {volume["name"]: volume for volume in pod.spec.get("volumes", [])}
        for volume in volumes.values():
            if "secret" in volume and volume["secret"]["secretName"] not in secrets:
                yield f"{pod.where}: nobody makes the Secret {volume['secret']['secretName']}"
            if "configMap" in volume and volume["configMap"]["name"] not in maps:
                yield f"{pod.where}: nobody makes the ConfigMap {volume['configMap']['name']}"
            if "persistentVolumeClaim" in volume and volume["persistentVolumeClaim"]["claimName"] not in claims:
                yield f"{pod.where}: nobody makes the claim {volume['persistentVolumeClaim']['claimName']}"
        for container in pod.containers:
            for mount in container.get("volumeMounts", []):
                if mount["name"] not in volumes:
                    yield f"{pod.where}: has no volume {mount['name']}"
            for entry in container.get("env", []):
                if entry["name"] == "RAY_AUTH_TOKEN_PATH" and entry["value"] not in _mounted_files(pod, secrets, maps):
                    yield f"{pod.where}: has no file {entry['value']}"
    yield from _missing_files(documents, secrets, maps)


def _missing_files(
    documents: list[Document], secrets: Mapping[str, set[str]], maps: Mapping[str, set[str]]
) -> Iterator[str]:
    """Yield complaints about files of options that are missing in the pods that read them."""
    workers = [pod for pod in pods(documents) if pod.labels.get(COMPONENT) == "ray-worker"]
    for pod, _, reading in readings(documents):
        for path in sorted(reading.paths()):
            in_ray = any(o.command == "verifier" and o.ray_address for o in reading.outrider) and "/tls/" in path
            for reader in workers if in_ray else [pod]:
                if path.startswith("/etc/outrider/") and path not in _mounted_files(reader, secrets, maps):
                    yield f"{reader.where}: has no file {path}"


def _mounted_files(pod: Pod, secrets: Mapping[str, set[str]], maps: Mapping[str, set[str]]) -> set[str]:
    volumes = {volume["name"]: volume for volume in pod.spec.get("volumes", [])}
    found = set()
    for container in pod.containers:
        for mount in container.get("volumeMounts", []):
            volume = volumes[mount["name"]]
            keys = secrets.get(volume.get("secret", {}).get("secretName"), set())
            keys = keys | maps.get(volume.get("configMap", {}).get("name"), set())
            found |= {f"{mount['mountPath']}/{key}" for key in keys}
    return found


def hardening(documents: list[Document]) -> Iterator[str]:
    """Check that every pod keeps to the `restricted` standard, has a read-only root, and declares its resources."""
    for pod in pods(documents):
        security = pod.spec.get("securityContext", {})
        if (security.get("runAsNonRoot"), security.get("runAsUser")) != (True, PLAIN_USER):
            yield f"{pod.where}: does not run as user {PLAIN_USER}"
        if security.get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield f"{pod.where}: has no seccomp profile"
        if pod.spec.get("automountServiceAccountToken") is not False:
            yield f"{pod.where}: carries a token for Kubernetes's API"
        # Otherwise Kubernetes sets OUTRIDER_COORDINATOR_PORT and the like, which would set options.
        if pod.spec.get("enableServiceLinks") is not False:
            yield f"{pod.where}: gets variables of Services, which our options would read"
        for container in pod.containers:
            yield from (f"{pod.where}: {trouble}" for trouble in _container_troubles(container))
            writable = {m["mountPath"] for m in container.get("volumeMounts", []) if not m.get("readOnly")}
            for path in {"/tmp", "/var/lib/outrider"} - writable:
                if image_of(container) != "edge":
                    yield f"{pod.where}: cannot write to {path}"


def _container_troubles(container: Document) -> Iterator[str]:
    security = container.get("securityContext", {})
    wanted = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    yield from (f"{name} is not {value}" for name, value in wanted.items() if security.get(name) != value)
    for kind in ("requests", "limits"):
        missing = {"cpu", "memory"} - set(container.get("resources", {}).get(kind, {}))
        if missing:
            yield f"has no {kind} of {', '.join(sorted(missing))}"


ALL = (images, commands, ports, selectors, references, hardening)


def complaints(documents: list[Document]) -> list[str]:
    """Return the complaints of all checks."""
    return [complaint for check in ALL for complaint in check(documents)]
