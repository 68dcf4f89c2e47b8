"""Chat templates: as transformers renders them, and what a hostile one cannot do."""

from __future__ import annotations

import asyncio
import json
import os
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from outrider.edge.chat import rendering
from outrider.edge.chat.rendering import TemplateProcess
from outrider.edge.chat.template import ChatTemplate, TemplateSource
from outrider.proto.errors import InvalidArgument

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": '<a> & "b" é'},
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": "more"},
]
CHATML = """{%- if messages[0]['role'] == 'system' %}
    {%- set ns = namespace(system=messages[0].content) %}
{%- else %}
    {%- set ns = namespace(system='none') %}
{%- endif %}
{{- bos_token ~ '[' ~ ns.system ~ ']' }}
{%- for message in messages[1:] %}
    {%- if loop.index > 10 %}{% break %}{% endif %}
    {%- set content = message.content | trim %}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ '<|im_start|>' + message.role + '\\n' + content }}{% endgeneration %}
    {%- else %}{{ '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' * 1 }}{% endif %}
{%- endfor %}
{{ messages | tojson }} {{ {'a': 1, 'b': 'é<'} | tojson(indent=2) }}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""


def render(text: str, turns: list[dict[str, str]] = TURNS, **variables: object) -> str:
    """Render in this process."""
    source = TemplateSource.of(text)
    assert source is not None
    return ChatTemplate(source).render(turns, variables)


@asynccontextmanager
async def process_of(source: str) -> AsyncIterator[TemplateProcess]:
    template = await TemplateProcess.of(source)
    assert template is not None
    try:
        yield template
    finally:
        await template.close()


def test_it_renders_as_transformers_does() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    (expected,), _ = render_jinja_template(
        conversations=[TURNS], chat_template=CHATML, add_generation_prompt=True, bos_token="<s>"
    )
    assert render(json.dumps({"chat_template": CHATML, "bos_token": "<s>"})) == expected


def test_the_embedded_targets_template_is_its_tokenizers() -> None:
    from outrider.cloud.models.family_index import chat_template_json, load_tokenizer, resolve_target

    tokenizer = load_tokenizer(resolve_target("reference"))
    expected = tokenizer.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
    assert render(chat_template_json("reference")) == expected


def test_it_is_read_from_a_tokenizer_config_a_named_list_or_a_bare_file() -> None:
    source = "{{ bos_token }}{{ messages[0].content }}"
    config = {"chat_template": source, "bos_token": {"content": "<s>", "lstrip": False}, "eos_token": None}
    named = {
        **config,
        "chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": source}],
    }
    for text in (json.dumps(config), json.dumps(named)):
        assert render(text, [{"role": "user", "content": "hi"}]) == "<s>hi"
    assert render("{{ messages[0].content }}", [{"role": "user", "content": "hi"}]) == "hi"
    for nothing in ("", " \n", "{}", '{"chat_template": null}'):
        assert TemplateSource.of(nothing) is None


@pytest.mark.parametrize(
    "hostile",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ '{0.__class__}'.format(1) }}{{ ('%s' | format(''.__class__)).x.y }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_a_template_cannot_reach_into_python(hostile) -> None:
    with pytest.raises(InvalidArgument, match="chat_template"):
        render(hostile)


@pytest.mark.parametrize(
    "greedy",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'x' * 10000000000 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ 'x'.ljust(9999999999) }}",
        "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set s = 'x' * 2000000 %}{{ s.replace('x', s) }}",
        "{% set s = 'x' * 2000000 %}{{ ('{0}' * 100000).format(s) }}",
        "{{ '{:>{}}'.format(1, 9999999999) }}",
        "{% set n = namespace(s='x') %}{% for i in range(40) %}{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}{% endfor %}",
    ],
)
async def test_a_template_cannot_take_all_time_or_memory(greedy, monkeypatch) -> None:
    monkeypatch.setattr(rendering, "CPU_S", 0.3)
    before = resource.getrusage(resource.RUSAGE_SELF)
    with pytest.raises(InvalidArgument, match="chat_template"):
        async with process_of(greedy) as template:
            await template.render(TURNS)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime - before.ru_utime < 20
    assert after.ru_maxrss - before.ru_maxrss < 400_000  # kilobytes


@pytest.mark.parametrize(
    "doubled",
    [
        "{{ ns.l | tojson | length }}",
        "{{ ns.l == ns.m }}",
        "{{ ([[0] * 1000] * (99999 + messages | length)) | sum(start=[]) | length }}",
    ],
)
async def test_c_code_that_never_ends_or_takes_all_memory_costs_one_chat_alone(doubled, monkeypatch) -> None:
    monkeypatch.setattr(rendering, "CPU_S", 0.3)
    lists = "{% set ns = namespace(l=[1], m=[1]) %}{% for i in range(40) %}"
    lists += "{% set ns.l = [ns.l, ns.l] %}{% set ns.m = [ns.m, ns.m] %}{% endfor %}"
    source = (
        "{% if messages[0].content == 'evil' %}" + lists + doubled + "{% else %}{{ messages[0].content }}{% endif %}"
    )
    async with process_of(source) as template:
        chats = [template.render([{"content": what}]) for what in ("evil", "one", "two")]
        evil, *good = await asyncio.gather(*chats, return_exceptions=True)
        assert good == ["one", "two"]
        assert isinstance(evil, InvalidArgument)
        assert "more than 0.3 s" in evil.message or "memory" in evil.message


async def test_chats_share_one_process_that_has_no_keys_and_is_replaced_when_it_dies(monkeypatch) -> None:
    monkeypatch.setenv("OUTRIDER_API_KEY", "otr_secret")
    async with process_of("{{ messages[0].content }}{{ effort }}") as template:
        process = template._process
        assert process is not None
        environment = await asyncio.to_thread(Path(f"/proc/{process.pid}/environ").read_text)
        assert "PATH=" in environment
        assert "otr_secret" not in environment
        for i in range(3):
            assert await template.render([{"content": str(i)}], effort="!") == f"{i}!"
        assert template._process is process
        os.kill(process.pid, 9)
        with pytest.raises(InvalidArgument, match="status -9"):
            await template.render([{"content": "x"}])
        assert await template.render([{"content": "é\N{GRINNING FACE}"}]) == "é\N{GRINNING FACE}"


async def test_a_chat_that_is_left_does_not_give_its_prompt_to_the_next() -> None:
    async with process_of("{% for i in range(20000) %}{% endfor %}{{ messages[0].content }}") as template:
        left = asyncio.create_task(template.render([{"content": "left"}]))
        await asyncio.sleep(0)
        left.cancel()
        assert await template.render([{"content": "mine"}]) == "mine"


def test_a_prompt_is_bounded_by_its_length() -> None:
    with pytest.raises(InvalidArgument, match="shorten the messages"):
        render("{{ 'x' * 5000000 }}")


def test_what_a_template_says_against_a_chat_is_what_the_client_reads(start, scripted) -> None:
    source = "{{ raise_exception('roles must alternate') }}"
    with start(scripted(chat_template=source)) as live:
        reply = live.chat()
        assert (reply.status, reply.error["param"]) == (400, "messages")
        assert "roles must alternate" in reply.error["message"]
        assert live.complete().status == 200


def test_without_a_template_chats_are_sent_to_completions(start, scripted) -> None:
    for template in ("", "{{ broken"):
        with start(scripted(chat_template=template)) as live:
            reply = live.chat()
            assert (reply.status, reply.error["code"]) == (400, "no_chat_template")
            assert "/v1/completions" in reply.error["message"]
