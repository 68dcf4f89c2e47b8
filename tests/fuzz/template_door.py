"""Chat templates of strangers' models: refused by name, or they make a prompt within the limits.

The daemon renders in a process that the kernel ends where a template takes too much. Here it is rendered beside the
test, so what looks as if it took too much is left out, and loops end by a signal.
"""

from __future__ import annotations

import json
import random
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from refusals import check_refusal

from outrider.edge.chat.template import MAX_CHARACTERS, ChatTemplate, TemplateSource
from outrider.proto.errors import InvalidArgument

MAX_LENGTH = 1024
LOOPS_S = 5.0  # of the processor
_EXPLOSIVE = re.compile(r"\*\*|\d{5}|(\*[^*]*){3}|(for[^f]*){4}", re.DOTALL)
_MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi {{ 7 * 7 }} \u00e9"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": [1, None]}}}]},
]
_SOURCES = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "{{ bos_token }}{%- set ns = namespace(n=0) -%}{% for m in messages if m.content is string %}"
    "{% set ns.n = ns.n + 1 %}"
    "{{ ns.n ~ ': ' ~ m.content | trim | upper }}{% else %}none{% endfor %}",
    "{% macro turn(m, i=0) %}{{ m | tojson(indent=2) }}{{ m.content.split('{')[-1] }}{% endmacro %}"
    "{% for m in messages %}{{ turn(m, loop.index0) }}{% if loop.last %}{% break %}{% endif %}{% endfor %}",
    "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(', ') }}"
    "{{ 'banana' | replace('a', 'bb') }}",
    "{% generation %}{{ strftime_now('%Y') }}{% endgeneration %}{{ '%s' | format(messages | length) }}{{ 'x' * 9 }}",
    "{% set a = [1, 2, 3] %}{{ a | sum }}{{ a[::-1] | list }}{{ range(5) | batch(2) | list }}"
    "{{ {'a': 1} | items | list }}",
)
_PIECES = (
    "{{", "}}", "{%", "%}", "{#", "#}", "-", "|", "~", "**", "*", "%", "//", "(", ")", "[", "]", ".", "=", "'", '"',
    "for x in messages", "endfor", "if", "endif", "else", "macro f(x)", "endmacro", "set y = ", "call f(1)",
    "endcall", "raw", "endraw", "filter upper", "endfilter", "block b", "endblock", "import 'x' as y", "extends 'x'",
    "include 'x'", "| tojson", "| center(99)", "| indent(9)", "| join", "| replace('a','bb')", "| format(1)",
    "| list", "| sum", "| map", "| groupby('role')", "| attr('__class__')", ".__class__", ".__mro__", "['__init__']",
    "cycler", "joiner", "lipsum()", "namespace()", "dict(a=1)", "range(999)", "1e99", "10 ** 9", "99999999",
    "loop.index", "self", "caller()", "messages",
)  # fmt: skip


def seeds() -> list[bytes]:
    """Return templates with and without messages of their own, and a tokenizer's configuration."""
    config = {"chat_template": [{"name": "default", "template": _SOURCES[0]}], "bos_token": {"content": "<s>"}}
    texts = [*_SOURCES, json.dumps(config)]
    return [text.encode() for text in texts] + [f"{_SOURCES[0]}\0{json.dumps(_MESSAGES[1:])}".encode()]


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Put pieces of Jinja into a template, double parts of it, or cut some out."""
    text = data.decode(errors="replace")
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(text) + 1)
        end = min(len(text), at + rng.choice((0, 0, 1, 4, 16)))
        text = text[:at] + rng.choice((rng.choice(_PIECES), rng.choice(_PIECES), text[at:end] * 2, "")) + text[end:]
    return text.encode(errors="replace")


def try_input(data: bytes) -> None:
    """Compile one template and render messages, which may follow it after a zero byte."""
    source, _, given = data.decode(errors="replace").partition("\0")
    if _EXPLOSIVE.search(source):
        return
    parsed = TemplateSource.of(source)
    if parsed is None:
        return
    try:
        with _loops_end():
            prompt = ChatTemplate(parsed).render(_messages(given), {"reasoning_effort": "low"})
    except InvalidArgument as error:
        check_refusal(error)
        return
    assert isinstance(prompt, str)
    assert len(prompt) <= MAX_CHARACTERS


@contextmanager
def _loops_end() -> Iterator[None]:
    """Raise in a template's loops after a while, which is a failure of the template like any other."""

    def end(*_: object) -> None:
        raise TimeoutError("it loops")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, LOOPS_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _messages(given: str) -> list[Any]:
    try:
        parsed = json.loads(given)
    except (ValueError, RecursionError):
        return _MESSAGES
    return parsed if isinstance(parsed, list) else _MESSAGES
