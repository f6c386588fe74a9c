"""What edgepipe learns from a template's renderings, where it keeps that, and templates that try to prevent it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgepipe.store.store import ModelStore
from edgepipe.text.conversations.efforts import known_effort
from edgepipe.text.conversations.known_traits import TRAITS_FILE, learn_traits, model_traits
from edgepipe.text.conversations.traits import CAREFUL, CHOICES, TRAITS_VERSION, ModelTraits, TemplateTraits
from edgepipe.text.template import ChatTemplate, TemplateRenderer, hf_template
from edgepipe.weights.card import read_card
from edgepipe.weights.manifest import read_manifest
from tests.support.gateways.strict_templates import (
    ALTERNATES,
    NEEDS_USER,
    NULL_CONTENT,
    OBJECTS,
    ONE_CALL,
    PARTS,
    SHORT_IDS,
)
from tests.support.gateways.template_traits import traits_of
from tests.support.models.files import source_folder

LINES = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (NEEDS_USER, {"no_user": "empty user", "late_system": "tagged", "systems": "joined", "tools": "keyword"}),
        (NEEDS_USER, {"efforts": ("low", "medium", "xhigh"), "strict_efforts": True, "developer": "system"}),
        (ONE_CALL, {"calls": "one each", "call_text": "own turn", "call_content": "kept", "tools": "keyword"}),
        (ALTERNATES, {"system": "user", "users": "joined", "assistants": "joined", "late_system": "tagged"}),
        (ALTERNATES, {"tools": "text", "calls": "text", "results": "user"}),
        (NULL_CONTENT, {"call_content": "null", "arguments": "text", "call_text": "own turn", "tools": "text"}),
        (SHORT_IDS, {"ids": "short", "after_calls": "empty answer", "call_text": "text", "calls": "kept"}),
        (OBJECTS, {"odd_arguments": "wrapped", "arguments": "object"}),
        (PARTS, {"content": "parts"}),
        (LINES, {"tools": "text", "calls": "text", "results": "kept", "efforts": (), "switches": frozenset()}),
    ],
)
def test_a_template_s_traits_are_learned_from_what_it_renders_and_refuses(
    template: str, expected: dict[str, object]
) -> None:
    traits = traits_of(template).with_tools
    assert {name: getattr(traits, name) for name in expected} == expected


def test_a_template_that_takes_everything_gets_everything_as_it_was_sent() -> None:
    template = """{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{{ m.reasoning_content or '' }}
    {%- for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments|tojson }}{% endfor %}{% endfor %}
    {%- if tools %}{{ tools|tojson }}{% endif %}"""
    kept = {name: choices[0] for name, choices in CHOICES.items()} | {"developer": "system"}
    traits = traits_of(template)
    assert {name: getattr(traits.with_tools, name) for name in kept} == kept
    assert {name: getattr(traits.plain, name) for name in kept} == kept


@pytest.mark.parametrize(
    ("levels", "strict", "given", "expected"),
    [
        ("low medium xhigh", True, "high", "xhigh"),
        ("low medium xhigh", True, "minimal", "low"),
        ("low medium xhigh", True, "odd", None),
        ("low high", True, "medium", "high"),
        ("none high", True, "low", "high"),
        ("", True, "high", None),
        ("minimal low", False, "high", "high"),
        ("minimal low", False, "none", "minimal"),
        ("low high", False, "max", "high"),
        ("low high", False, "medium", "medium"),
        ("none", False, "high", "high"),
        ("", False, "odd", "odd"),
    ],
)
def test_an_effort_becomes_the_nearest_level(levels: str, strict: bool, given: str, expected: str | None) -> None:
    traits = TemplateTraits(efforts=tuple(levels.split()), strict_efforts=strict)
    assert known_effort(given, traits) == expected


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "fact"),
    [
        (LOOP, "time or memory"),
        ("{{ 'a' * 9000000000 }}", "time or memory"),
        ("{{ x", "no template"),
        pytest.param("{{ 7 ** (9 ** 8) }}", "time or memory", marks=pytest.mark.long),
    ],
)
def test_a_template_that_loops_or_allocates_gets_careful_traits_and_a_sentence(source: str, fact: str) -> None:
    traits = learn_traits(ChatTemplate(sources={"default": source}))
    assert (traits.plain, traits.with_tools) == (CAREFUL, CAREFUL)
    assert fact in traits.note


def test_a_template_that_loops_for_some_conversations_is_learned_without_them() -> None:
    source = "{% if messages[0].content == 'userqx1' and messages|length == 2 and messages[1].role == 'user' %}"
    traits = learn_traits(ChatTemplate(sources={"default": f"{source}{LOOP}{{% endif %}}{LINES}"}))
    assert traits.plain.users == "joined"
    assert not traits.note


def test_traits_do_not_depend_on_the_day() -> None:
    """A switch changes the prompt; the time of the day, to the microsecond, does not count as a change."""
    template = "{{ strftime_now('%d %B %H:%M:%S %f') }}" + LINES
    assert traits_of(template).plain.switches == frozenset()


def test_traits_are_beside_the_card_and_no_part_of_the_model_s_hash(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "models")
    source = source_folder(tmp_path)
    (source / "chat_template.jinja").write_text(LINES)
    folder = store.pull(str(source)).path
    path = folder / TRAITS_FILE
    stored = json.loads(path.read_text())
    assert stored["version"] == TRAITS_VERSION
    assert all(file.name != TRAITS_FILE for file in read_manifest(folder).files)
    template = read_card(folder).template
    known = model_traits(folder, template)
    assert ModelTraits.from_json(stored["traits"]) == known
    damaged = [b"", b"{}", json.dumps(stored | {"version": 0}).encode(), json.dumps(stored | {"traits": {}}).encode()]
    for content in damaged:
        path.write_bytes(content)
        assert model_traits(folder, template) == known
        assert json.loads(path.read_text()) == stored
    other = ChatTemplate(sources={"default": ALTERNATES})
    assert model_traits(folder, other).plain.system == "user"


async def test_a_byte_order_mark_before_a_template_is_in_no_prompt(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("\ufeff" + LINES, encoding="utf-8")
    async with TemplateRenderer(hf_template(tmp_path)) as renderer:
        assert await renderer.render([{"role": "user", "content": "hi"}]) == "<user>hi"
