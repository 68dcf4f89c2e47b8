"""Failures of the machine that a command runs on, in words."""

from __future__ import annotations

import errno

MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
NO_MEMORY = ("can't allocate memory", "out of memory", "unable to mmap", "cannot allocate memory")


def machine_failure(error: BaseException) -> str:
    """Return one line that says what this machine lacks; empty: it is something else, which a traceback explains."""
    words = " ".join(str(error).split())
    if isinstance(error, MemoryError) or any(sign in words.lower() for sign in NO_MEMORY):
        return "there is too little memory here: take a smaller target, fewer verifiers, or a smaller --kv-tokens"
    if isinstance(error, OSError) and error.errno in MACHINE:
        return f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)
    return ""
