"""Traits of a test's own template, learned in this process."""

from __future__ import annotations

from functools import cache

from edgepipe.text.conversations.learning_child import Renderer, learned
from edgepipe.text.conversations.traits import ModelTraits
from edgepipe.text.template_child import make_environment

TURNS = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
"""The rest of a template that takes any conversation."""
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@cache
def traits_of(source: str) -> ModelTraits:
    """The traits of a template for requests with and without tools."""
    template = make_environment().from_string(source)
    plain, with_tools = (learned(Renderer(template, TOKENS), tools=tools) for tools in (False, True))
    return ModelTraits(plain=plain, with_tools=with_tools)
