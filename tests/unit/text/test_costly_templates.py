"""Chat templates of costly parts, generated: each renders or is refused, and an honest one renders right after it."""

from __future__ import annotations

import random

import pytest

from edgepipe.errors import TemplateFailed
from edgepipe.text.template import ChatTemplate, TemplateRenderer
from edgepipe.text.template_child import MAX_TEXT_CHARS

FILTERS = ("upper", "tojson", "list | length", "wordwrap(1)", "center(99999999)", "indent(99999)", "reverse", "urlize")
HONEST = "{% if messages[0].content == 'honest' %}{{ messages[0].content }}{% else %}"


def costly(rng: random.Random, depth: int = 0) -> str:
    """A part of a template that may take time, memory or text without end."""
    if depth > 3:
        return rng.choice(("{{ s }}", "x", "{{ loop.index }}", "{{ messages | tojson }}"))
    inner = costly(rng, depth + 1) + (costly(rng, depth + 1) if rng.random() < 0.5 else "")
    many = rng.choice((3, 100, 99_999))
    return rng.choice(
        (
            f"{{% for i in range({many}) %}}{inner}{{% endfor %}}",
            f"{{% for c in s * {many} %}}{inner}{{% endfor %}}",
            f"{{% set s = s * {rng.choice((2, 1000, 10**8))} %}}{inner}",
            f"{{% set s = s ~ s %}}{{% set s = s ~ s %}}{inner}",
            f"{{{{ s | {rng.choice(FILTERS)} }}}}{inner}",
            f"{{{{ {rng.choice((2, 9, 99))} ** ({many} ** {rng.choice((1, 2, 8))}) }}}}{inner}",
            f"{{% macro f{depth}() %}}{{{{ f{depth}() }}}}{{% endmacro %}}{{{{ f{depth}() }}}}{inner}",
            f"{{% filter {rng.choice(('upper', 'trim', 'escape'))} %}}{inner}{{% endfilter %}}",
            f"{{{{ ({'(' * 50}1{')' * 50}) }}}}{inner}",
            f"{{{{ range({many * 1000}) | {rng.choice(('list', 'join', 'sum', 'sort', 'batch(2) | list'))} }}}}{inner}",
        )
    )


async def rendered(renderer: TemplateRenderer, content: str) -> str | TemplateFailed:
    """Render a conversation of one turn."""
    try:
        return await renderer.render([{"role": "user", "content": content}])
    except TemplateFailed as error:
        return error


async def judge(seed: int) -> bool:
    """Render one, then an honest conversation with the same renderer. Return whether the first came out."""
    source = HONEST + "{% set s = 'a' * 1000 %}" + costly(random.Random(seed)) + "{% endif %}"
    async with TemplateRenderer(ChatTemplate(sources={"default": source})) as renderer:
        first, honest = await rendered(renderer, "x" * 100), await rendered(renderer, "honest")
    if isinstance(first, str):
        assert len(first) <= MAX_TEXT_CHARS
    else:
        assert first.fact
        if isinstance(honest, TemplateFailed):  # no conversation can be rendered: the source is no template
            assert honest.fact == first.fact, seed
            return False
    assert honest == "honest", seed
    return isinstance(first, str)


@pytest.mark.parametrize("seed", range(2))
async def test_whatever_a_template_does_it_ends_and_the_next_chat_is_rendered(seed: int) -> None:
    await judge(seed)


@pytest.mark.long
async def test_whatever_a_template_does_with_many_more_seeds() -> None:
    outcomes = [await judge(seed) for seed in range(2, 202)]
    assert 0 < sum(outcomes) < len(outcomes)
