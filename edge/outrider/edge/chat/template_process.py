"""The process that renders a chat template: `python -m outrider.edge.chat.template_process`, asked by `rendering`.

A request and its answer are JSON, after their length in four bytes. The first request is the template. Memory is
limited for good, and the processor's time for each request: the kernel ends this process when it is over, also in the
middle of C code.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
from typing import Any, BinaryIO

from outrider.edge.chat.template import ChatTemplate, TemplateSource
from outrider.proto.errors import InvalidArgument

MEMORY_BYTES = 512 << 20
LENGTH = struct.Struct(">I")


def _limit(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def _read(stream: BinaryIO) -> dict[str, Any] | None:
    """Return the next request; None at the end."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    request: dict[str, Any] = json.loads(stream.read(length))
    return request


def _answer(template: ChatTemplate | None, request: dict[str, Any]) -> tuple[ChatTemplate, str]:
    if template is None:
        return ChatTemplate(TemplateSource(**request["template"])), ""
    return template, template.render(request["messages"], request["variables"])


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer until the requests end."""
    template: ChatTemplate | None = None
    while (request := _read(requests)) is not None:
        signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])  # its signal ends the process
        try:
            template, prompt = _answer(template, request)
            answer = {"prompt": prompt}
        except InvalidArgument as error:
            answer = {"refused": error.message}
        data = json.dumps(answer).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(LENGTH.pack(len(data)) + data)
        answers.flush()


if __name__ == "__main__":
    _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CORE, 0)
    serve(sys.stdin.buffer, sys.stdout.buffer)
