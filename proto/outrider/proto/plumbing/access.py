"""API keys and what each may use: sessions at once, tokens a minute; the clock is an argument.

Keys live in a TOML file, one table a key (`outrider key NAME` makes one):

    [keys.alice]
    sha256 = "9f86d0…"         # of the secret; the file never holds the secret itself
    max_sessions = 4           # at once; absent: no limit
    tokens_per_minute = 6000   # on average, a minute's worth at once; absent: no limit
    admin = true               # may see the status and drain verifiers; absent: no
    learning = true            # drafters may learn from its texts, where its edge or daemon does; absent: no
    service = "batch"          # of texts that ask for none, or { gap_ms = 75, first_token_ms = 500 }; absent: none

Secrets are 256 random bits, so a plain SHA-256 reveals nothing of one; salt and stretching protect passwords.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import secrets
import stat
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from outrider.proto.errors import ConfigError, InvalidArgument, ResourceExhausted, Unauthenticated
from outrider.proto.plumbing.files import Watched
from outrider.proto.types import SHA256, ServiceGoal

logger = logging.getLogger(__name__)

SECRET_PREFIX = "otr_"  # noqa: S105 - lets people and scanners recognise a leaked secret
SECRET_BYTES = 32
RETRY_WHEN_BUSY_S = 1.0
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Key:
    """One caller.

    Attributes:
        name: name for logs and metrics; 1 to 64 letters, digits, `_`, `.`, `-`.
        sha256: hash of the secret, 64 lower-case hexadecimal digits.
        max_sessions: sessions at once; None: no limit.
        tokens_per_minute: mean rate of tokens, a minute's worth of which can come at once; None: no limit. Generated
            ones count, and at verifiers also those of prompts that no cache held.
        admin: whether it may see the coordinator's status and drain verifiers.
        learning: whether verifiers may keep its texts for a day, to train drafters, where its edges allow that too; a
            daemon's: whether that may share them, keep its answers and learn from them there.
        service: service of its texts that ask for none; None: none.

    Raises:
        ConfigError: a value is wrong; the field is named.
    """

    name: str
    sha256: str
    max_sessions: int | None = None
    tokens_per_minute: int | None = None
    admin: bool = False
    learning: bool = False
    service: ServiceGoal | None = None

    def __post_init__(self) -> None:
        where = f"keys.{self.name}"
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"{self.name!r} is not 1 to 64 letters, digits, '_', '.' or '-'", field="keys")
        if not isinstance(self.sha256, str) or not SHA256.fullmatch(self.sha256):
            raise ConfigError(
                "must be the 64 lower-case hexadecimal digits that `outrider key` prints", field=f"{where}.sha256"
            )
        for name in ("max_sessions", "tokens_per_minute"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(
                    "must be a whole number, 1 or more; leave it out for no limit", field=f"{where}.{name}"
                )
        for name in ("admin", "learning"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError("must be true or false", field=f"{where}.{name}")

    def toml(self) -> str:
        name = self.name if "." not in self.name else f'"{self.name}"'
        lines = [f"[keys.{name}]", f'sha256 = "{self.sha256}"']
        lines += [f"{f} = {getattr(self, f)}" for f in ("max_sessions", "tokens_per_minute") if getattr(self, f)]
        lines += [f"{f} = true" for f in ("admin", "learning") if getattr(self, f)]
        lines += [f"service = {json.dumps(str(self.service))}"] if self.service is not None else []
        return "\n".join(lines) + "\n"


def new_secret() -> str:
    """Return a fresh secret: 256 random bits, printable."""
    return SECRET_PREFIX + secrets.token_urlsafe(SECRET_BYTES)


def secret_sha256(secret: str) -> str:
    """Return the SHA-256 of a secret in the form that a keys file holds."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


class Keys:
    """A set of keys for several threads, which follows its file.

    A file that is empty, wrong, unreadable or gone holds no key: none is taken until it is mended, since what was
    taken out of it must not go on working.
    """

    def __init__(self, keys: tuple[Key, ...] = ()) -> None:
        self._keys = _distinct(keys)
        self._file: Watched[tuple[Key, ...]] | None = None

    @classmethod
    def from_file(cls, path: Path) -> Self:
        keys = cls()
        otherwise = "are all refused until that is mended"
        keys._file = Watched("API keys", (path,), lambda: _read(path.expanduser()), otherwise)
        keys._keys = keys._file.value
        return keys

    def current(self) -> tuple[Key, ...]:
        if self._file is not None:
            self._file.if_changed()
            self._keys = () if self._file.error is not None else self._file.value
        return self._keys

    @property
    def unusable(self) -> bool:
        """Whether no key is taken since the file cannot be used."""
        self.current()
        return self._file is not None and self._file.error is not None

    def still_has(self, key: Key) -> bool:
        return any(each.sha256 == key.sha256 for each in self.current())

    def check(self, presented: str) -> Key:
        """Return the key of the secret `presented`, in a time that tells nothing of it; raises `Unauthenticated`."""
        keys = self.current()
        if not keys and self.unusable:
            message = "cannot be checked: the file of keys is unusable; its log says why"
            raise Unauthenticated(message, field="api_key", code="OUT-201")
        if not presented:
            message = "is missing; give one with --api-key-file or OUTRIDER_API_KEY"
            raise Unauthenticated(message, field="api_key", code="OUT-201")
        digest = secret_sha256(presented)
        found: Key | None = None
        for key in keys:
            if hmac.compare_digest(key.sha256, digest):
                found = key
        if found is None:
            raise Unauthenticated("is not known here; ask the operator for one", field="api_key", code="OUT-201")
        return found

    def check_header(self, value: str) -> Key:
        """Return the key in an `Authorization` header or metadata, `Bearer SECRET`; raises `Unauthenticated`."""
        scheme, _, presented = value.strip().partition(" ")
        return self.check(presented.strip() if scheme.lower() == "bearer" else "")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(key.name for key in self._keys)


def _distinct(keys: tuple[Key, ...]) -> tuple[Key, ...]:
    hashes = [key.sha256 for key in keys]
    for key in keys:
        if hashes.count(key.sha256) > 1:
            raise ConfigError("is the secret of another key, too; make a new one", field=f"keys.{key.name}.sha256")
    return keys


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
    try:
        given = {"service": ServiceGoal.parse(table["service"])} if "service" in table else {}
    except InvalidArgument as error:
        raise ConfigError(error.message, field=f"keys.{name}.service") from error
    return Key(name, **{**table, **given})


class Bucket:
    """A token bucket that may fall into debt, since the length of a text is not known beforehand.

    It holds a minute's worth at most and fills evenly. Tokens spent beyond that delay the next session.
    """

    def __init__(self, tokens_per_minute: int, now_s: float) -> None:
        self.tokens_per_minute = tokens_per_minute
        self._level = float(tokens_per_minute)
        self._at_s = now_s

    def set_rate(self, tokens_per_minute: int, now_s: float) -> None:
        """Fill at this rate from now on; a bucket that holds more than a minute's worth is cut down to it."""
        self.level(now_s)
        self.tokens_per_minute = tokens_per_minute
        self._level = min(self._level, float(tokens_per_minute))

    def level(self, now_s: float) -> float:
        elapsed_s = max(0.0, now_s - self._at_s)
        self._at_s = max(self._at_s, now_s)
        self._level = min(float(self.tokens_per_minute), self._level + elapsed_s * self.tokens_per_minute / 60)
        return self._level

    def spend(self, tokens: float, now_s: float) -> None:
        self.level(now_s)
        self._level -= tokens

    def wait_s(self, tokens: float, now_s: float) -> float:
        return max(0.0, tokens - self.level(now_s)) * 60 / self.tokens_per_minute


class Meters:
    """Buckets of the keys by their names, for one event loop."""

    def __init__(self) -> None:
        self._buckets: dict[str, Bucket] = {}

    def of(self, name: str, tokens_per_minute: int, now_s: float) -> Bucket:
        """Return the bucket of key `name`, which fills at this rate from now on."""
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = self._buckets[name] = Bucket(tokens_per_minute, now_s)
        bucket.set_rate(tokens_per_minute, now_s)
        return bucket


class Ticket:
    """One running session of a key, made by `Limits.admit`; `close` gives its slot back."""

    def __init__(self, key: Key, bucket: Bucket | None, running: Counter[str]) -> None:
        self.key = key
        self._bucket = bucket
        self._running = running
        self._open = True
        running[key.name] += 1

    def spend(self, tokens: int, now_s: float) -> None:
        """Count generated tokens, after `close` too; what a running text overdraws delays the key's next ones."""
        if self._bucket is not None:
            self._bucket.spend(tokens, now_s)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._running[self.key.name] -= 1


def all_taken(key: Key) -> ResourceExhausted:
    """Return the error of a session for which its key has no slot."""
    message = f"key {key.name!r} has {key.max_sessions} sessions running, which is all it may have; wait for one to end"
    return ResourceExhausted(message, field="api_key", retry_after_s=RETRY_WHEN_BUSY_S, code="OUT-205")


class Limits:
    """Holds keys to their limits, for one event loop; times are seconds of any clock that never goes back."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()
        self._meters = Meters()

    def admit(self, key: Key, now_s: float) -> Ticket:
        """Admit one more session of `key`; raises `ResourceExhausted`."""
        if key.max_sessions is not None and self._running[key.name] >= key.max_sessions:
            raise all_taken(key)
        return Ticket(key, self.check_tokens(key, now_s), self._running)

    def check_tokens(self, key: Key, now_s: float) -> Bucket | None:
        """Return the bucket of `key`, if its tokens are limited; raises `ResourceExhausted`."""
        if key.tokens_per_minute is None:
            return None
        bucket = self._meters.of(key.name, key.tokens_per_minute, now_s)
        wait_s = bucket.wait_s(1, now_s)
        if wait_s > 0:
            message = f"key {key.name!r} has spent its {key.tokens_per_minute} tokens a minute; wait {wait_s:.1f} s"
            raise ResourceExhausted(message, field="api_key", retry_after_s=wait_s, code="OUT-205")
        return bucket

    def spend(self, key: Key, tokens: int, now_s: float) -> None:
        """Count reported tokens of a session without its ticket."""
        if key.tokens_per_minute is not None:
            self._meters.of(key.name, key.tokens_per_minute, now_s).spend(tokens, now_s)

    def running(self, name: str) -> int:
        return self._running[name]
