"""The services of a compose file as processes in chroots, on a loopback of their own."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from image_store import Container, ImageStore

WAIT_S = 300.0
READ_ONLY = "import os; os.open('/opt/outrider/written', os.O_CREAT | os.O_WRONLY)"


def merged(files: list[Path]) -> dict[str, Any]:
    """Return the services of compose files, merged: mappings and lists of volumes add up, else the last file counts."""
    services: dict[str, Any] = {}
    for file in files:
        for name, given in yaml.safe_load(file.read_text(encoding="utf-8"))["services"].items():
            into = services.setdefault(name, {})
            for key, value in given.items():
                if isinstance(value, dict) and key in into:
                    into[key] = into[key] | value
                elif key == "volumes":
                    into[key] = [*into.get(key, []), *value]
                else:
                    into[key] = value
    return services


@dataclass
class Service:
    """One service: its container, its command and its process."""

    name: str
    given: dict[str, Any]
    container: Container
    log: Path
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0


@dataclass
class ComposeInChroot:
    """A compose file's services, started in the order of their `depends_on`; for a process with mounts of its own.

    Every service sees one loopback, on which its file's names are 127.0.0.1. Roots are read-only, and processes have
    the image's user and no capability. Volumes and tmpfs are folders under `folder`; nothing limits memory or /dev/shm.
    """

    store: ImageStore
    given: dict[str, Any]
    folder: Path
    services: dict[str, Service] = field(default_factory=dict)

    def up(self) -> None:
        """Start all services; raises `RuntimeError` with the end of a log if one fails or is not healthy in time."""
        while waiting := [name for name in self.given if name not in self.services]:
            name = next(n for n in waiting if all(other in self.services for other in self._needs(n)))
            for other, how in self._needs(name).items():
                self._wait_for(self.services[other], how["condition"])
            self._start(name)
        for service in self.services.values():
            if self._check_of(service):
                self._wait_for(service, "service_healthy")

    def run_in(self, name: str, *words: str, user: str = "") -> subprocess.CompletedProcess[str]:
        """Run a command in a service's container with its environment, as its user unless another is given."""
        command, environment = self._command(self.services[name], list(words), user)
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=WAIT_S)

    def root_is_read_only(self, name: str) -> bool:
        """Return whether root itself cannot write to a container's root."""
        return "Read-only file system" in self.run_in(name, "python3", "-c", READ_ONLY, user="0:0").stderr

    def down(self) -> None:
        """End every process that still runs, the last started first."""
        for service in reversed(self.services.values()):
            if service.process is not None and service.process.poll() is None:
                service.process.terminate()
                try:
                    service.process.wait(30)
                except subprocess.TimeoutExpired:
                    service.process.kill()

    def _needs(self, name: str) -> dict[str, Any]:
        needs: dict[str, Any] = self.given[name].get("depends_on", {})
        return needs

    def _start(self, name: str) -> None:
        given = self.given[name]
        container = self.store.start(given["image"])
        root = container.folder
        hosts = "".join(f"127.0.0.1 {host}\n" for host in ("localhost", socket.gethostname(), *self.given))
        (root / "etc/hosts").write_text(hosts, encoding="utf-8")
        volumes = [volume.split(":") for volume in self._volumes(name)]
        for _, place, *_ in volumes:
            (root / place.lstrip("/")).mkdir(parents=True, exist_ok=True)
        _mount("--bind", str(root), str(root))
        _mount("-o", "remount,bind,ro", str(root))
        _mount("-t", "proc", "proc", str(root / "proc"))
        _mount("--rbind", "/dev", str(root / "dev"))
        for source, place, *mode in volumes:
            target = str(root / place.lstrip("/"))
            _mount("--bind", source, target)
            if mode:
                _mount("-o", f"remount,bind,{mode[0]}", target)
        self.services[name] = Service(name, given, container, self.folder / f"{name}.log")
        self._run(self.services[name])

    def _run(self, service: Service) -> None:
        entry = service.given.get("entrypoint") or service.container.config["Entrypoint"]
        words = [*entry, *service.given.get("command", service.container.config.get("Cmd") or [])]
        with service.log.open("ab") as log:
            command, environment = self._command(service, words)
            service.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def _command(self, service: Service, words: list[str], user: str = "") -> tuple[list[str], dict[str, str]]:
        """Return a command that runs words in a container without privileges, and its environment."""
        config = service.container.config
        who, _, group = (user or config["User"]).partition(":")
        command = ["chroot", str(service.container.folder), "/usr/bin/setpriv", f"--reuid={who}", f"--regid={group}"]
        command += ["--clear-groups", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "--", *words]
        return command, dict(text.split("=", 1) for text in config["Env"]) | service.given.get("environment", {})

    def _volumes(self, name: str) -> list[str]:
        """Return `FOLDER:PLACE` or `FOLDER:PLACE:ro` of all that a service reads or writes; names share folders."""
        given = self.given[name]
        scratch = [entry.partition(":")[0] for entry in given.get("tmpfs", [])]
        found = [f"{self._folder(name + place.replace('/', '-'))}:{place}" for place in scratch]
        for entry in given.get("volumes", []):
            volume, _, place = entry.partition(":")
            found.append(f"{self._folder(volume)}:{place}")
        return found

    def _folder(self, name: str) -> str:
        folder = self.folder / name
        if not folder.exists():
            folder.mkdir(parents=True)
            os.chown(folder, 10001, 10001)
            folder.chmod(0o700)
        return str(folder)

    def _check_of(self, service: Service) -> list[str]:
        """Return the words of a service's health check; empty: it has none."""
        own = service.given.get("healthcheck", {})
        if own.get("disable"):
            return []
        test = own.get("test") or (service.container.config.get("Healthcheck") or {}).get("Test") or ["NONE"]
        return list(test[1:])

    def _wait_for(self, service: Service, condition: str) -> None:
        assert service.process is not None
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            status = service.process.poll()
            if status and service.restarts < self._restarts_of(service):
                service.restarts += 1
                self._run(service)
            elif status is not None and (status or condition == "service_healthy"):
                raise RuntimeError(f"{service.name} ended with {status}: {self._end_of(service)}")
            if condition == "service_started" or (status == 0 and condition == "service_completed_successfully"):
                return
            if condition == "service_healthy" and not self.run_in(service.name, *self._check_of(service)).returncode:
                return
            time.sleep(1)
        raise RuntimeError(f"{service.name} was not {condition} in {WAIT_S:.0f} s: {self._end_of(service)}")

    def _restarts_of(self, service: Service) -> int:
        """Return how often a service that fails is started again; ever again counts as five times."""
        rule = str(service.given.get("restart", "no"))
        return int(rule.partition(":")[2] or 5) if rule.startswith(("on-failure", "unless-stopped", "always")) else 0

    def _end_of(self, service: Service) -> str:
        return service.log.read_text(encoding="utf-8", errors="replace")[-2000:]


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)
