"""API keys and what each may use: sessions at once, tokens a minute. No network here; the clock is an argument.

Keys live in a TOML file, one table a key (`outrider key NAME` makes one):

    [keys.alice]
    sha256 = "9f86d0…"         # of the secret; the file never holds the secret itself
    max_sessions = 4           # at once; absent: no limit
    tokens_per_minute = 6000   # on average, a minute's worth at once; absent: no limit
    admin = true               # may ask for the status and drain verifiers; absent: no

Secrets are 256 random bits, so a plain SHA-256 of one tells nothing: salt and stretching protect passwords.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import stat
import threading
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from outrider.proto.errors import ConfigError, ResourceExhausted, Unauthenticated

logger = logging.getLogger(__name__)

SECRET_PREFIX = "otr_"  # noqa: S105 - lets people and scanners see what a leaked string is
SECRET_BYTES = 32
RETRY_WHEN_BUSY_S = 1.0
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Key:
    """One caller. Raises `ConfigError` that names the field.

    Attributes:
        name: for logs and metrics; 1 to 64 letters, digits, `_`, `.`, `-`.
        sha256: of the secret, 64 lower-case hexadecimal digits.
        max_sessions: at once; None: no limit.
        tokens_per_minute: generated, on average; a minute's worth can come at once. None: no limit.
        admin: may ask for the coordinator's status and drain verifiers.
    """

    name: str
    sha256: str
    max_sessions: int | None = None
    tokens_per_minute: int | None = None
    admin: bool = False

    def __post_init__(self) -> None:
        where = f"keys.{self.name}"
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"{self.name!r} is not 1 to 64 letters, digits, '_', '.' or '-'", field="keys")
        if not isinstance(self.sha256, str) or not _SHA256.fullmatch(self.sha256):
            raise ConfigError(
                "must be the 64 lower-case hexadecimal digits that `outrider key` prints", field=f"{where}.sha256"
            )
        for name in ("max_sessions", "tokens_per_minute"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(
                    "must be a whole number, 1 or more; leave it out for no limit", field=f"{where}.{name}"
                )
        if not isinstance(self.admin, bool):
            raise ConfigError("must be true or false", field=f"{where}.admin")

    def toml(self) -> str:
        """The table of a keys file that holds it."""
        name = self.name if "." not in self.name else f'"{self.name}"'
        lines = [f"[keys.{name}]", f'sha256 = "{self.sha256}"']
        lines += [f"{f} = {getattr(self, f)}" for f in ("max_sessions", "tokens_per_minute") if getattr(self, f)]
        return "\n".join([*lines, *(["admin = true"] if self.admin else [])]) + "\n"


def new_secret() -> str:
    """A fresh secret: 256 random bits, printable."""
    return SECRET_PREFIX + secrets.token_urlsafe(SECRET_BYTES)


def secret_sha256(secret: str) -> str:
    """The SHA-256 of a secret, as a keys file holds it."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


class Keys:
    """A set of keys. Those of a file are read anew when it changes; a broken new version leaves the old in force.

    Safe to use from several threads.
    """

    def __init__(self, keys: tuple[Key, ...] = ()) -> None:
        self._keys = _distinct(keys)
        self._path: Path | None = None
        self._version: object = None
        self._lock = threading.Lock()

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """The keys in the TOML file at `path`.

        Raises:
            ConfigError: unreadable, no TOML, an unknown or wrong field, no key at all, or others may write to it.
        """
        keys = cls()
        keys._path = path.expanduser()
        keys._version = _version(keys._path)
        keys._keys = _read(keys._path)
        return keys

    def check(self, presented: str) -> Key:
        """The key whose secret is `presented`. Takes as long whichever key it is, and whether it is one.

        Raises:
            Unauthenticated: none is; says how to give one.
        """
        self._reload()
        if not presented:
            raise Unauthenticated("is missing; give one with --api-key-file or OUTRIDER_API_KEY", field="api_key")
        digest = secret_sha256(presented)
        found: Key | None = None
        for key in self._keys:
            if hmac.compare_digest(key.sha256, digest):
                found = key
        if found is None:
            raise Unauthenticated("is not known here; ask the operator for one", field="api_key")
        return found

    def check_header(self, value: str) -> Key:
        """The key in an `Authorization` header or `authorization` metadata, `Bearer SECRET`; raises as `check`."""
        scheme, _, presented = value.strip().partition(" ")
        return self.check(presented.strip() if scheme.lower() == "bearer" else "")

    @property
    def names(self) -> tuple[str, ...]:
        """Whose keys there are."""
        return tuple(key.name for key in self._keys)

    def _reload(self) -> None:
        if self._path is None:
            return
        with self._lock:
            version = _version(self._path)
            if version == self._version:
                return
            self._version = version  # also where the new version is broken: one warning each
            try:
                self._keys = _read(self._path)
            except ConfigError as error:
                logger.warning("API keys stay as they were: %s", error)
            else:
                logger.info("API keys read anew from %s: %s", self._path, ", ".join(self.names))


def _distinct(keys: tuple[Key, ...]) -> tuple[Key, ...]:
    hashes = [key.sha256 for key in keys]
    for key in keys:
        if hashes.count(key.sha256) > 1:
            raise ConfigError("is the secret of another key too; make a new one", field=f"keys.{key.name}.sha256")
    return keys


def _version(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: Path) -> tuple[Key, ...]:
    try:
        mode = path.stat().st_mode
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", field="api_keys") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise ConfigError(f"{path} is not TOML: {error}", field="api_keys") from error
    if mode & stat.S_IWOTH:
        raise ConfigError(f"anybody may write to {path}; chmod 600 it", field="api_keys")
    if mode & stat.S_IROTH:
        logger.warning("anybody on this machine may read %s; chmod 600 it", path)
    if set(tables) - {"keys"}:
        extra = sorted(set(tables) - {"keys"})[0]
        raise ConfigError(f"{path} holds {extra!r}; each key is a table [keys.NAME]", field="api_keys")
    named = tables.get("keys", {})
    if not isinstance(named, Mapping) or not named:
        raise ConfigError(f"{path} holds no [keys.NAME]; `outrider key NAME` makes one", field="api_keys")
    return _distinct(tuple(_key(name, table) for name, table in named.items()))


def _key(name: str, table: Any) -> Key:
    known = [f.name for f in fields(Key) if f.name != "name"]
    if not isinstance(table, Mapping):
        raise ConfigError(f"must be a table [keys.{name}]", field=f"keys.{name}")
    for field_name in table:
        if field_name not in known:
            raise ConfigError(f"is no field; there are {', '.join(known)}", field=f"keys.{name}.{field_name}")
    if "sha256" not in table:
        raise ConfigError("is missing; `outrider key NAME` prints it", field=f"keys.{name}.sha256")
    return Key(name, **table)


class Bucket:
    """A token bucket that may fall into debt: nobody knows beforehand how long a text will be.

    It holds a minute's worth at most, and fills evenly. What is spent beyond that delays whoever comes next.
    """

    def __init__(self, tokens_per_minute: int, now_s: float) -> None:
        self._per_minute = tokens_per_minute
        self._level = float(tokens_per_minute)
        self._at_s = now_s

    @property
    def tokens_per_minute(self) -> int:
        """At which it fills."""
        return self._per_minute

    def set_rate(self, tokens_per_minute: int, now_s: float) -> None:
        """Fill so much a minute from now on; a fuller bucket than that is cut down to it."""
        self.level(now_s)
        self._per_minute = tokens_per_minute
        self._level = min(self._level, float(tokens_per_minute))

    def level(self, now_s: float) -> float:
        """Tokens in it; below 0: in debt."""
        elapsed_s = max(0.0, now_s - self._at_s)
        self._at_s = max(self._at_s, now_s)
        self._level = min(float(self._per_minute), self._level + elapsed_s * self._per_minute / 60)
        return self._level

    def spend(self, tokens: float, now_s: float) -> None:
        """Take `tokens` out."""
        self.level(now_s)
        self._level -= tokens

    def wait_s(self, tokens: float, now_s: float) -> float:
        """Seconds until it holds `tokens`."""
        return max(0.0, tokens - self.level(now_s)) * 60 / self._per_minute


class Meters:
    """The bucket of each key by its name. One event loop."""

    def __init__(self) -> None:
        self._buckets: dict[str, Bucket] = {}

    def of(self, name: str, tokens_per_minute: int, now_s: float) -> Bucket:
        """The bucket of key `name`, which fills at this rate from now on."""
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = self._buckets[name] = Bucket(tokens_per_minute, now_s)
        bucket.set_rate(tokens_per_minute, now_s)
        return bucket


class Ticket:
    """One running session of a key; `close` gives its place back. Made by `Limits.admit`."""

    def __init__(self, key: Key, bucket: Bucket | None, running: Counter[str]) -> None:
        self.key = key
        self._bucket = bucket
        self._running = running
        self._open = True
        running[key.name] += 1

    def spend(self, tokens: int, now_s: float) -> None:
        """Count tokens generated, after `close` too, since figures may come late.

        A text that runs is never cut: what it overdraws delays the key's next ones.
        """
        if self._bucket is not None:
            self._bucket.spend(tokens, now_s)

    def close(self) -> None:
        """The session is over; closing again is harmless."""
        if self._open:
            self._open = False
            self._running[self.key.name] -= 1


class Limits:
    """Holds keys to their limits. One event loop; times are seconds of any clock that never goes back."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()
        self._meters = Meters()

    def admit(self, key: Key, now_s: float) -> Ticket:
        """Room for one more session of `key`.

        Raises:
            ResourceExhausted: as many run as it may have, or its tokens are spent; has `retry_after_s`.
        """
        if key.max_sessions is not None and self._running[key.name] >= key.max_sessions:
            raise ResourceExhausted(
                f"key {key.name!r} has {key.max_sessions} sessions running, which is all it may have; "
                "wait for one to end",
                field="api_key",
                retry_after_s=RETRY_WHEN_BUSY_S,
            )
        if key.tokens_per_minute is None:
            return Ticket(key, None, self._running)
        bucket = self._meters.of(key.name, key.tokens_per_minute, now_s)
        wait_s = bucket.wait_s(1, now_s)
        if wait_s > 0:
            raise ResourceExhausted(
                f"key {key.name!r} has spent its {key.tokens_per_minute} tokens a minute; wait {wait_s:.1f} s",
                field="api_key",
                retry_after_s=wait_s,
            )
        return Ticket(key, bucket, self._running)

    def spend(self, key: Key, tokens: int, now_s: float) -> None:
        """Count tokens of a session without its ticket, as they are reported."""
        if key.tokens_per_minute is not None:
            self._meters.of(key.name, key.tokens_per_minute, now_s).spend(tokens, now_s)

    def running(self, name: str) -> int:
        """Sessions that key `name` has open."""
        return self._running[name]
