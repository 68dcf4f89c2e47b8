"""Certificates, API keys and secrets in the files that options name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.deploy.arguments import Given
from outrider.deploy.commands.edge_options import KeySettings
from outrider.edge.edge_config import EdgeConfig
from outrider.proto.errors import ConfigError
from outrider.proto.plumbing.files import read_key
from outrider.proto.plumbing.tls import ClientTls, ServerTls

if TYPE_CHECKING:
    from outrider.edge.link.security import Security


def serving_tls(given: Given) -> ServerTls | None:
    """Return the certificates of a server; None: plain text."""
    return ServerTls.from_options(**given.fields(ServerTls))


def security(given: Given) -> Security:
    """Return the credentials of a client of the coordinator."""
    from outrider.edge.link.security import Security

    fields = given.fields(EdgeConfig)
    tls = ClientTls.from_options(*(fields[f"tls_{name}"] for name in ("ca", "cert", "key", "server_name")))
    return Security(tls, api_key(given), fields["plaintext"])


def api_key(given: Given) -> str:
    """Return the content of the key file, or else OUTRIDER_API_KEY; empty without both. Raises `ConfigError`."""
    path = given(KeySettings).api_key_file
    if path is None:
        return os.environ.get("OUTRIDER_API_KEY", "").strip()
    return read_key(path, "api_key_file")


def lease_secret(path: Path | None) -> bytes:
    """Return the content of the file that coordinator and verifiers share; empty without one. Raises `ConfigError`."""
    if path is None:
        return b""
    try:
        return path.expanduser().read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", field="lease_secret_file") from error
