"""Lines to type next, once a cluster runs."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.coordinator.coordinator_config import CoordinatorConfig
from outrider.deploy.arguments import Given
from outrider.edge.daemon import DaemonConfig
from outrider.proto.address import is_loopback, join_address, split_address
from outrider.proto.plumbing.tls import ServerTls

EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - recognised, not bound
ASKED = '{"model": "%s", "temperature": 0, "messages": [{"role": "user", "content": "What is 2 + 3?"}]}'


def next_steps(coordinator: str, model: str, verifier: str, given: Given) -> Iterator[str]:
    """Yield what to type to use a cluster, and to end it.

    Args:
        coordinator: address at which the coordinator listens.
        model: id by which edges ask for the target.
        verifier: name of one of the verifiers.
        given: options of the command that has started the cluster.
    """
    place, elsewhere = _reached(coordinator)
    needed = f"--coordinator {place}{_credentials(given)}"
    page = f"http://{DaemonConfig().listen}"
    yield "next, in another terminal:"
    yield f"  outrider edge {needed.replace(' --tls-', ' --cloud-tls-')}"
    yield f"      the page: {page}/   OpenAI's API: {page}/v1"
    yield f"      curl {page}/v1/chat/completions -H 'Content-Type: application/json' -d '{ASKED % model}'"
    yield f"  outrider chat {needed}"
    yield f"  outrider generate {needed} 'Once upon a time'"
    yield f"  outrider status {needed}"
    yield f"  outrider drain {verifier} {needed}"
    if elsewhere:
        yield "HOST is a name or address of this machine."
    yield "Ctrl-C ends the cluster."


def _reached(coordinator: str) -> tuple[str, bool]:
    """Return where edges find the coordinator, and whether a name of this machine must be put in."""
    host, port = split_address(coordinator, "listen")
    return (f"HOST:{port}", True) if host in EVERYWHERE else (join_address(host, port), False)


def _credentials(given: Given) -> str:
    """Return the options by which an edge passes the coordinator's checks."""
    asked, tls = given.fields(CoordinatorConfig), given.fields(ServerTls)
    words = []
    if tls["cert"] is not None:
        words.append("--tls-ca FILE")
    if tls["client_ca"] is not None:
        words.append("--tls-cert FILE --tls-key FILE")
    if asked["api_keys"] is not None:
        words.append("--api-key-file FILE")
        if tls["cert"] is None and not is_loopback(split_address(asked["listen"], "listen")[0]):
            words.append("--plaintext")
    return "".join(f" {word}" for word in words)
