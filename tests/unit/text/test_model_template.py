"""Chat templates: goldens, what templates may use, and what is refused or killed (M18, M19)."""

from __future__ import annotations

import asyncio
import json
import os
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from edgepipe.errors import ModelInvalid, TemplateFailed
from edgepipe.text.gguf_tokenizer import special_tokens
from edgepipe.text.template import ChatTemplate, TemplateRenderer, TemplateTimeouts, gguf_template, hf_template
from edgepipe.weights.gguf_header import read_gguf_header
from tests.support.models.files import GOLDEN, smollm2_gguf

CHATS = [item for item in json.loads(GOLDEN.read_text())["items"] if item["messages"]]
USER = [{"role": "user", "content": "<b>é"}]


@pytest.fixture
async def rendering() -> AsyncIterator[Any]:
    """Renders a source with the user's message; all children end with the test."""
    made: list[TemplateRenderer] = []

    async def render(source: str, **keywords: Any) -> str:
        made.append(TemplateRenderer(ChatTemplate(sources={"default": source}, special_tokens={"bos_token": "<s>"})))
        return await made[-1].render(USER, **keywords)

    yield render
    for renderer in made:
        await renderer.close()


async def test_goldens(tmp_path: Path) -> None:
    metadata = read_gguf_header(smollm2_gguf(tmp_path)).metadata
    async with TemplateRenderer(gguf_template(metadata, special_tokens(metadata))) as renderer:
        for item in CHATS:
            assert await renderer.render(item["messages"]) == item["text"]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s><b>é"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "<b>é"}]'),
        ("{{ messages[0] | tojson(indent=1) }}", '{\n "role": "user",\n "content": "<b>é"\n}'),
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        (
            "{% set ns = namespace(ids=[]) %}{% set _ = ns.ids.append(7) %}{{ ns.ids }}{{ ns.ids.pop(0) }}{{ ns.ids }}",
            "[7]7[]",
        ),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{% generation %}{{ 1 }}{% endgeneration %}", "1"),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
        ("{% if tools is none %}no tools{% endif %}", "no tools"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% set ns = namespace(n=1) %}{% for i in [1] %}{% set ns.n = 2 %}{% endfor %}{{ ns.n }}", "2"),
    ],
)
async def test_what_templates_may_use(source: str, text: str, rendering: Any) -> None:
    assert await rendering(source) == text


async def test_keywords_reach_the_template(rendering: Any) -> None:
    assert await rendering("{{ enable_thinking }}", enable_thinking=False) == "False"
    assert await rendering("{{ add_generation_prompt }}", add_generation_prompt=False) == "False"
    with pytest.raises(TemplateFailed, match="no_such_word"):
        await rendering("x", no_such_word=1)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__ }}",
        "{{ lipsum.__globals__ }}",
        "{{ messages | attr('clear') }}",
        "{{ messages.clear() }}",
        "{{ messages[0].update({}) }}",
        "{{ messages.append.__self__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{% include 'x' %}",
        "{% import 'x' as y %}",
        "{% extends 'x' %}",
    ],
)
async def test_m18_escapes_are_refused(source: str, rendering: Any) -> None:
    with pytest.raises(TemplateFailed) as caught:
        await rendering(source)
    assert caught.value.http_status == 400
    assert len(caught.value.lines()) == 3


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 200000000 }}",
        "{{ messages[0].content * 400000000 }}",
        "{{ 'a' * 5000000 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% set ns = namespace(s='a' * 1000) %}{% for i in range(99999) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{{ 7 ** (9 ** 8) }}",
        "{{ ('a' * 20000) | wordwrap(1) | length }}{{ '(' * 99999 }}{{ 1" + "+(1" * 5000,
    ],
)
async def test_m19_work_without_end_is_ended(source: str, rendering: Any) -> None:
    with pytest.raises(TemplateFailed) as caught:
        await rendering(source)
    assert caught.value.fact


async def test_after_a_kill_the_next_chat_is_rendered() -> None:
    source = "{% if messages[0].content == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    source += "{% endfor %}{% elif messages[0].content == 'big' %}{{ 'a' * messages[1].n }}{% endif %}ok"
    async with TemplateRenderer(ChatTemplate(sources={"default": source})) as renderer:
        assert await renderer.render([{"content": "a"}]) == "ok"
        with pytest.raises(TemplateFailed, match="CPU"):
            await renderer.render([{"content": "loop"}])
        assert await renderer.render([{"content": "b"}]) == "ok"
        with pytest.raises(TemplateFailed, match="memory"):
            await renderer.render([{"content": "big"}, {"n": 10**9}])
        assert await renderer.render([{"content": "c"}]) == "ok"


async def test_half_of_a_surrogate_pair_in_an_earlier_call_can_be_shown(rendering: Any) -> None:
    assert await rendering("{{ tools | tojson }}{{ tools[0] }}", tools=["a\ud83d"]) == '["a?"]a?'


async def test_an_answer_that_came_too_late_does_not_meet_the_next_question() -> None:
    loop = "{% if messages[0].slow %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate(sources={"default": loop + "{% endif %}{{ messages[0].content }}"})
    async with TemplateRenderer(template, TemplateTimeouts(render_s=0.05)) as renderer:
        await renderer.start()
        with pytest.raises(TemplateFailed, match="did not answer"):
            await renderer.render([{"slow": True, "content": "late"}])
    async with TemplateRenderer(template) as renderer:
        waiting = asyncio.create_task(renderer.render([{"slow": True, "content": "cancelled"}]))
        await asyncio.wait([waiting], timeout=0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await renderer.render([{"content": "next"}]) == "next"


async def test_many_at_once_each_get_their_own() -> None:
    async with TemplateRenderer(ChatTemplate(sources={"default": "{{ messages[0].content }}"})) as renderer:
        texts = await asyncio.gather(*(renderer.render([{"content": str(i)}]) for i in range(30)))
    assert texts == [str(i) for i in range(30)]


@pytest.mark.parametrize("source", ["{{ x", "{% for %}", "{% endif %}", "{{ 1 | nosuchfilter }}"])
async def test_broken_templates_fail_by_type(source: str, rendering: Any) -> None:
    with pytest.raises(TemplateFailed):
        await rendering(source)


async def test_the_templates_own_complaint_is_told(rendering: Any) -> None:
    with pytest.raises(TemplateFailed, match="roles must alternate"):
        await rendering("{{ raise_exception('roles must alternate') }}")


async def test_a_complaint_without_end_is_cut_in_the_child(rendering: Any) -> None:
    source = "{{ raise_exception(messages[0].content * 15000000) }}"  # 60 MB as the user's message has four characters
    tracemalloc.start()
    try:
        with pytest.raises(TemplateFailed) as caught:
            await rendering(source)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert "<b>é" in caught.value.fact
    assert len(caught.value.fact) < 1000


async def test_messages_that_are_no_json_are_refused(rendering: Any) -> None:
    with pytest.raises(TemplateFailed):
        await rendering("x", tools=[object()])


def test_a_model_without_template() -> None:
    with pytest.raises(TemplateFailed, match="no chat template"):
        ChatTemplate(sources={}).choose(tools=False)


def test_templates_of_a_folder(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    template = hf_template(tmp_path)
    assert (template.choose(tools=False), template.choose(tools=True)) == ("plain", "tools")
    assert template.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "one"}))
    assert hf_template(tmp_path).choose(tools=True) == "one"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "of a processor"}))
    assert hf_template(tmp_path).choose(tools=True) == "one"
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert hf_template(tmp_path).choose(tools=True) == "of a processor"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert hf_template(tmp_path).choose(tools=False) == "file"
    (tmp_path / "chat_template.jinja").write_text("x" * ((1 << 20) + 1))
    with pytest.raises(ModelInvalid, match="too large"):
        hf_template(tmp_path)


def test_a_folder_without_template(tmp_path: Path) -> None:
    assert hf_template(tmp_path).sources == {}


def test_the_watch_for_platforms_without_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    from edgepipe.text import template_child

    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)  # the test's process must not end
    template_child._make_watch()(0, None)
    assert ended == [], "it is below the limit"
    monkeypatch.setattr(template_child, "MEMORY_BYTES", -(1 << 50))
    template_child._make_watch()(0, None)
    assert ended == [3]
