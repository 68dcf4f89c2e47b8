"""Run the services of compose.yaml with TLS from built images, decode through them, and print what was seen as JSON.

For `run_images.py`, which starts it with a network, processes and mounts of its own: all ends with it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from compose_in_chroot import ComposeInChroot, merged
from image_store import ROOT, ImageStore

COMPOSE = [ROOT / "deploy" / "docker" / name for name in ("compose.yaml", "compose.tls.yaml")]
PROMPT = "def main(argv):\n"
RUN = ["outrider", "run", "--json", "--coordinator", "coordinator:50050", "--max-tokens", "96"]
RUN += ["--tls-ca", "/etc/outrider/authority/ca.pem"]
CHAT = {"model": "reference", "messages": [{"role": "user", "content": "What is 2 + 3?"}], "max_tokens": 64}


def run_services(store: ImageStore, folder: Path) -> dict[str, Any]:
    """Start everything, decode three texts, check what the images promise, and return what was seen."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    began = time.monotonic()
    compose = ComposeInChroot(store, merged(COMPOSE), folder)
    try:
        compose.up()
        ready_s = time.monotonic() - began
        drafted, plain = (
            _generated(compose, *options) for options in ((), ("--drafter", "none", "--drafts-here", "0"))
        )
        return {
            "ready_s": round(ready_s, 1),
            "chat": _chat(),
            "tokens": len(drafted["tokens"]),
            "accepted_drafts": drafted["accepted"],
            "same_text_without_drafts": drafted["tokens"] == plain["tokens"],
            "verifiers": _status(compose),
            "users": {name: service.container.config["User"] for name, service in compose.services.items()},
            "read_only_roots": [name for name in compose.services if compose.root_is_read_only(name)],
        }
    finally:
        compose.down()


def _generated(compose: ComposeInChroot, *options: str) -> dict[str, Any]:
    done = compose.run_in("edge", *RUN, *options, PROMPT)
    if done.returncode:
        raise RuntimeError(f"outrider run failed: {done.stderr[-1000:]}")
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[0])
    return record


def _chat() -> str:
    """Ask the daemon as any program on the machine would, and return its answer."""
    request = urllib.request.Request(
        "http://127.0.0.1:8080/v1/chat/completions",
        data=json.dumps(CHAT).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(json.loads(answer.read())["choices"][0]["message"]["content"])


def _status(compose: ComposeInChroot) -> list[str]:
    command = ["outrider", "status", "--json", "--coordinator", "coordinator:50050"]
    done = compose.run_in("edge", *command, "--tls-ca", "/etc/outrider/authority/ca.pem")
    if done.returncode:
        raise RuntimeError(f"outrider status failed: {done.stderr[-1000:]}")
    return [str(verifier["name"]) for verifier in json.loads(done.stdout)["verifiers"]]


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    print(json.dumps(run_services(ImageStore(Path(given["store"]), given["driver"]), Path(given["folder"]))))
