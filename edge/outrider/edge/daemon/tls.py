"""TLS of the HTTP listener, with certificates that follow their files."""

from __future__ import annotations

import asyncio
import logging
import ssl

from outrider.proto.errors import ConfigError
from outrider.proto.plumbing.tls import ServerTls

LOOK_EVERY_S = 2.0

log = logging.getLogger(__name__)


class LiveTls:
    """An SSL context that connections to come share; `reload` gives it the certificate that the files hold now.

    Authorities of client certificates are added by a reload, and taken away only by a restart: OpenSSL cannot forget.

    Raises:
        ConfigError: a file is unreadable, not PEM, encrypted, or the key is not the certificate's.
    """

    def __init__(self, files: ServerTls) -> None:
        self._files = files
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        if files.client_ca is not None:
            self.context.verify_mode = ssl.CERT_REQUIRED
        self._load(self.context)
        self._seen = self._stamps()

    async def watch(self) -> None:
        """For ever: reload when a file changes."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if self._stamps() != self._seen:
                self.reload()

    def reload(self) -> None:
        """Read the files anew; what is broken changes nothing."""
        seen = self._stamps()
        try:
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # a half-written pair must not reach the live one
            self._load(self.context)
        except ConfigError as error:
            log.warning("the old certificate stays: %s", error)
        else:
            log.info("certificates read anew from %s", self._files.cert)
        self._seen = seen

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(self._files.cert.expanduser(), self._files.key.expanduser(), password=_no_password)
        except (OSError, ssl.SSLError, ValueError) as error:
            pair = f"{self._files.cert} and {self._files.key}"
            raise ConfigError(f"cannot use {pair}: {_plain(error)}", field="tls_cert") from error
        if self._files.client_ca is not None:
            try:
                context.load_verify_locations(self._files.client_ca.expanduser())
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(
                    f"cannot use {self._files.client_ca}: {_plain(error)}", field="tls_client_ca"
                ) from error

    def _stamps(self) -> list[tuple[int, int]]:
        stamps = []
        for path in self._files.files:
            try:
                found = path.expanduser().stat()
            except OSError:
                stamps.append((0, 0))
            else:
                stamps.append((found.st_mtime_ns, found.st_size))
        return stamps


def _no_password() -> str:
    raise ValueError("the key is encrypted; take its password off")


def _plain(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
