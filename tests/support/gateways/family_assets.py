"""Assets of a gateway that render a test's own template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from jinja2 import Template

from edgepipe.errors import TemplateFailed
from edgepipe.gateway.formats.detect import detect_format
from edgepipe.text.conversations.traits import ModelTraits
from edgepipe.text.template_child import make_environment, render
from tests.support.gateways.fake_engine import ByteAssets
from tests.support.gateways.template_traits import TOKENS, traits_of


@cache
def _compiled(template: str) -> Template:
    return make_environment().from_string(template)


class FamilyAssets(ByteAssets):
    """The byte tokenizer with a family's template."""

    def __init__(self, template: str) -> None:
        self._template = _compiled(template)
        self.traits: ModelTraits = traits_of(template)  # type: ignore[misc]
        self.chat = detect_format(template)

    async def render(self, messages: Sequence[Mapping[str, Any]], *, owner: str = "", **keywords: Any) -> str:
        answer = render(
            self._template, {**TOKENS, "messages": list(messages), "add_generation_prompt": True, **keywords}
        )
        if "text" in answer:
            return answer["text"]
        failed = TemplateFailed(fact=answer["detail"])
        failed.refused = True
        raise failed
