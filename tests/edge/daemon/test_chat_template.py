"""Chat templates: as transformers renders them, and what a hostile one cannot do."""

from __future__ import annotations

import json
import threading
import time

import pytest

from outrider.edge.daemon.chat_template import ChatTemplate
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


def test_it_renders_as_transformers_does() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    (expected,), _ = render_jinja_template(
        conversations=[TURNS], chat_template=CHATML, add_generation_prompt=True, bos_token="<s>"
    )
    assert ChatTemplate(CHATML, {"bos_token": "<s>"}).render(TURNS) == expected


def test_the_embedded_targets_template_is_its_tokenizers() -> None:
    from outrider.cloud.family_index import chat_template_json, load_tokenizer, resolve_target

    tokenizer = load_tokenizer(resolve_target("reference"))
    expected = tokenizer.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
    template = ChatTemplate.from_text(chat_template_json("reference"))
    assert template is not None
    assert template.render(TURNS) == expected


def test_it_is_read_from_a_tokenizer_config_a_named_list_or_a_bare_file() -> None:
    source = "{{ bos_token }}{{ messages[0].content }}"
    config = {"chat_template": source, "bos_token": {"content": "<s>", "lstrip": False}, "eos_token": None}
    named = {
        **config,
        "chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": source}],
    }
    for text in (json.dumps(config), json.dumps(named)):
        template = ChatTemplate.from_text(text)
        assert template is not None
        assert template.render([{"role": "user", "content": "hi"}]) == "<s>hi"
    bare = ChatTemplate.from_text("{{ messages[0].content }}")
    assert bare is not None
    assert bare.render([{"role": "user", "content": "hi"}]) == "hi"
    for nothing in ("", " \n", "{}", '{"chat_template": null}'):
        assert ChatTemplate.from_text(nothing) is None


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
        ChatTemplate(hostile).render(TURNS)


@pytest.mark.parametrize(
    "greedy",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999999999) %}x{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'x' * 10000000000 }}",
        "{{ 'x' * 3000000 }}{{ 'x' * 3000000 }}",
        "{{ [0] * 9999999999 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ 'x' | center(9999999999) }}",
        "{{ 'x'.ljust(9999999999) }}",
        "{{ 'x'.zfill(width=9999999999) }}",
        "{{ '{:>9999999999}'.format(1) }}",
        "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set s = 'x' * 2000000 %}{{ s.replace('x', s) }}",
        "{% set s = 'x' * 2000000 %}{{ s | replace('x', s) }}",
        "{% set s = 'x' * 2000000 %}{{ s.join([s, s, s]) }}",
        "{% set s = 'x' * 2000000 %}{{ [s, s, s] | join(s) }}",
        "{% set ns = namespace(s='x') %}{% for i in range(40) %}{% set ns.s = '{0}{0}'.format(ns.s) %}{% endfor %}",
        "{% set s = 'x' * 2000000 %}{{ ('{0}' * 100000).format(s) }}",
        "{{ '{:>{}}'.format(1, 9999999999) }}",
        "{% set ns = namespace(s='x') %}{% for i in range(40) %}{% set ns.s = [ns.s, ns.s] | join %}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for i in range(40) %}{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}{% endfor %}",
    ],
)
def test_a_template_cannot_take_all_time_or_memory(greedy, monkeypatch) -> None:
    import resource

    monkeypatch.setattr("outrider.edge.daemon.chat_template.MAX_SECONDS", 0.3)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(InvalidArgument, match="chat_template"):
        ChatTemplate(greedy).render(TURNS)
    assert time.process_time() - began < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # kilobytes


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


def test_the_time_limit_leaves_no_trace_function_in_place() -> None:
    import sys

    before = sys.gettrace()
    ChatTemplate("{{ messages }}").render(TURNS)
    assert sys.gettrace() is before
    done = []
    threads = [threading.Thread(target=lambda: done.append(ChatTemplate("{{ 1 }}").render(TURNS))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == ["1"] * 8


@pytest.mark.parametrize(
    "doubling",
    [
        "{% set n = namespace(s='x') %}{% for i in range(40) %}{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}{% endfor %}",
        "{% macro twice(s) %}{{ s }}{{ s }}{% endmacro %}{% set n = namespace(s='x') %}"
        "{% for i in range(40) %}{% set n.s = twice(n.s) %}{% endfor %}",
    ],
)
def test_output_of_blocks_and_macros_is_bounded_by_its_length_not_by_time(doubling) -> None:
    with pytest.raises(InvalidArgument, match="a string of more than"):
        ChatTemplate(doubling).render(TURNS)
