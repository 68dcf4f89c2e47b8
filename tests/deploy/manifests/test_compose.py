"""The compose files: what they start exists, takes its options, and is reachable from this machine only."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from dockerfile_stages import DOCKERFILE, IMAGES, exec_form, setting, stages
from manifest_commands import ports_of, read_command, unknown_names
from manifest_documents import ROOT

FOLDER = ROOT / "deploy" / "docker"
PLAIN, TLS = ("compose.yaml",), ("compose.yaml", "compose.tls.yaml")
STAGES = stages(DOCKERFILE.read_text(encoding="utf-8"))
KEYS = {
    "image", "build", "read_only", "cap_drop", "security_opt", "tmpfs", "network_mode", "entrypoint", "command",
    "environment", "volumes", "healthcheck", "depends_on", "ports", "shm_size", "restart",
}  # fmt: skip
CONDITIONS = {"service_started", "service_healthy", "service_completed_successfully"}


def merged(files: tuple[str, ...]) -> dict[str, Any]:
    """Merge files like `docker compose -f … -f …`: mappings merge, lists of volumes add up."""
    result: dict[str, Any] = {"services": {}, "volumes": {}}
    for name in files:
        document = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
        result["volumes"] |= document["volumes"]
        for service, values in document["services"].items():
            into = result["services"].setdefault(service, {})
            for key, value in values.items():
                if key == "volumes":
                    into[key] = [*into.get(key, []), *value]
                elif isinstance(value, dict) and key in into:
                    into[key] = {**into[key], **value}
                else:
                    into[key] = value
    return result


def image_of(service: dict[str, Any]) -> str:
    return str(service["image"]).removeprefix("outrider-")


def reading_of(service: dict[str, Any]):
    entry = service.get("entrypoint") or exec_form(setting(STAGES, image_of(service), "ENTRYPOINT"))
    return read_command([*entry, *service["command"]], service.get("environment", {}), image_of(service))


def is_a_shell(service: dict[str, Any]) -> bool:
    return service.get("entrypoint", [""])[0] in ("sh", "python")


@pytest.fixture(params=[PLAIN, TLS], ids=["plain", "tls"])
def services(request) -> dict[str, Any]:
    return merged(request.param)["services"]


def test_services_are_made_of_our_images_and_known_keys(services) -> None:
    for name, service in services.items():
        assert image_of(service) in IMAGES, name
        assert set(service) <= KEYS, name
        if "build" in service:
            assert service["build"]["target"] == image_of(service)
            context = (FOLDER / service["build"]["context"]).resolve()
            assert (context / service["build"]["dockerfile"]).samefile(DOCKERFILE)
    assert {image_of(s) for s in services.values() if "build" in s} == set(IMAGES)


def test_every_command_takes_its_options_and_variables(services) -> None:
    for service in services.values():
        if not is_a_shell(service):
            reading = reading_of(service)
            assert reading.complaints == []
            assert unknown_names(service.get("environment", {}), [reading]) == []


def test_ports_are_published_on_loopback_only_and_somebody_listens(services) -> None:
    published = [(name, port) for name, service in services.items() for port in service.get("ports", [])]
    assert {name for name, _ in published} == {"coordinator", "edge"}
    for name, port in published:
        host, outer, inner = port.split(":")
        assert host == "127.0.0.1"
        assert outer == inner
        assert int(inner) in reading_of(services[name]).listening()


def test_the_verifier_is_where_the_others_look_for_ray(services) -> None:
    (verifier,) = (o for o in reading_of(services["verifiers"]).outrider if o.command == "verifier")
    assert verifier.ray_address == "ray://ray-head:10001"
    assert ports_of(verifier) == {50051}
    assert services["coordinator"]["environment"]["RAY_ADDRESS"] == "ray-head:6379"
    assert "--port=6379" in services["ray-head"]["command"]
    offered = next(w for w in services["ray-head"]["command"] if w.startswith("--num-cpus="))
    assert verifier.cpus <= float(offered.partition("=")[2])


def test_services_wait_for_others_that_can_tell_when_they_are_ready(services) -> None:
    for service in services.values():
        for other, how in service.get("depends_on", {}).items():
            assert how["condition"] in CONDITIONS
            if how["condition"] == "service_healthy":
                assert services[other].get("healthcheck") != {"disable": True}


@pytest.mark.parametrize("files", [PLAIN, TLS], ids=["plain", "tls"])
def test_files_that_options_name_are_on_volumes_of_that_service(files) -> None:
    document = merged(files)
    for name, service in document["services"].items():
        mounts = {volume.split(":")[1] for volume in service.get("volumes", [])}
        assert {volume.split(":")[0] for volume in service.get("volumes", [])} <= set(document["volumes"])
        if is_a_shell(service):
            continue
        for path in reading_of(service).paths():
            readers = [document["services"]["ray-head"]] if name == "verifiers" and "/tls/" in path else [service]
            for reader in readers:
                mounts = {volume.split(":")[1] for volume in reader["volumes"]}
                assert any(path.startswith(f"{mount}/") for mount in mounts), f"{name}: {path}"


def test_every_container_is_read_only_without_capabilities(services) -> None:
    for service in services.values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]


def test_the_secrets_are_made_by_a_user_without_privileges() -> None:
    """That user cannot open a file for writing that it has made read-only, as root could."""
    program = merged(PLAIN)["services"]["secrets"]["command"][0]
    as_user = {"user": 10001, "group": 10001} if os.geteuid() == 0 else {}
    with tempfile.TemporaryDirectory() as place:  # pytest's own folders are closed to other users
        if as_user:
            os.chown(place, as_user["user"], as_user["group"])
        for _ in range(2):
            command = ["/usr/bin/env", "python3", "-c", program.replace("/etc/outrider/secrets", place)]
            subprocess.run(command, check=True, cwd="/", **as_user)
        made = {path.name: path for path in Path(place).iterdir()}
        assert made.keys() == {"lease", "ray-token"}
        assert len({path.read_text() for path in made.values()}) == 2
        assert {path.stat().st_mode & 0o777 for path in made.values()} == {0o400}


def test_an_edge_gets_neither_the_lease_secret_nor_a_private_key() -> None:
    volumes = merged(TLS)["services"]["edge"]["volumes"]
    assert {volume.split(":")[0] for volume in volumes} == {"drafters", "authority"}


def test_with_tls_nothing_of_an_edge_is_plain() -> None:
    services = merged(TLS)["services"]
    (coordinator,) = reading_of(services["coordinator"]).outrider
    (verifier,) = (o for o in reading_of(services["verifiers"]).outrider if o.command == "verifier")
    (edge,) = reading_of(services["edge"]).outrider
    assert not coordinator.insecure_listen
    assert not verifier.insecure_listen
    assert coordinator.tls_cert == verifier.tls_cert
    assert edge.cloud_tls_ca is not None
    check = services["coordinator"]["healthcheck"]["test"]
    assert read_command(check[1:], {}, "coordinator").complaints == []
    made = services["certs"]["command"][0]
    assert "--host coordinator" in made
    assert "--server-name=coordinator" in check


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"command": ["edge", "--coordinater=x:1"]}, "unrecognized arguments"),
        ({"command": ["edge", "--listen=0.0.0.0:8080"]}, "would refuse to listen"),
        ({"entrypoint": ["outrider-start"], "command": []}, "is not in the image"),
        ({"entrypoint": ["ray", "start"], "command": ["--heads"]}, "No such option"),
    ],
)
def test_a_mistake_in_a_command_is_seen(change, complaint) -> None:
    service = merged(PLAIN)["services"]["edge"] | change
    assert any(complaint in seen for seen in reading_of(service).complaints)
