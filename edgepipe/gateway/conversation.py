"""Renders a client's conversation as the prompt of a model, in the form that the model's chat template takes.

``edgepipe.text.conversations`` has the traits of templates and the repairs that they name.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from edgepipe.errors import TemplateFailed
from edgepipe.gateway.formats.chat_format import ChatFormat
from edgepipe.gateway.formats.hermes import HERMES
from edgepipe.gateway.models import Assets
from edgepipe.gateway.problems import bad_request
from edgepipe.gateway.reasoning_wish import reasoning_wish
from edgepipe.gateway.schema import ChatBody, Message
from edgepipe.gateway.shown_tools import complete_tool
from edgepipe.gateway.tool_calls import Call
from edgepipe.gateway.tool_choice import ToolChoice
from edgepipe.text.conversations.efforts import keywords_of
from edgepipe.text.conversations.fitting import Tools, Wording, fit
from edgepipe.text.conversations.roles import Turn
from edgepipe.text.conversations.traits import CAREFUL, TemplateTraits
from edgepipe.text.template_defaults import GIVEN_KEYWORDS

logger = logging.getLogger(__name__)


async def render_chat(
    assets: Assets, body: ChatBody, choice: ToolChoice, *, owner: str, defaults: Mapping[str, Any]
) -> str:
    """Render the prompt of a conversation. Raises TemplateFailed, QueueFull, HttpProblem for reserved keywords.

    ``defaults``: the served model's keywords, where the request does not say.

    If the template refuses it nevertheless, tools are given whole, with all that some templates take for granted; then
    turns become plain text that alternates. If it refuses these too, the error names the first turn that it refuses.
    """
    wish = reasoning_wish(body)
    switch = {} if wish.enabled is None else {"enable_thinking": wish.enabled}
    given = switch | (body.chat_template_kwargs or {})
    for name in given:
        if name not in GIVEN_KEYWORDS:
            raise bad_request(
                f"'{name[:64]}' is no keyword for chat templates", param=f"chat_template_kwargs.{name[:64]}"
            )
    traits = assets.traits.choose(tools=bool(choice.tools))
    unsaid = {name: value for name, value in defaults.items() if name != "reasoning_effort"}
    keywords = {
        **keywords_of(unsaid, defaults.get("reasoning_effort"), traits),
        **keywords_of(given, wish.effort, traits),
    }
    prompt = _Prompt(assets, choice.tools, keywords, owner)
    turns = client_turns([message.renamed(choice.names.for_model) for message in body.messages])
    refusals: list[TemplateFailed] = []
    for tried, its_traits in _ways(prompt, choice, traits):
        try:
            return await tried.render(turns, its_traits)
        except TemplateFailed as failed:
            if not failed.refused:
                raise
            logger.debug("the template refuses a conversation of roles=%s: %s", _roles(turns), failed.fact)
            refusals.append(failed)
    raise await prompt.explain(turns, traits, refusals[0]) from refusals[0]


def _ways(prompt: _Prompt, choice: ToolChoice, traits: TemplateTraits) -> list[tuple[_Prompt, TemplateTraits]]:
    """Return how to render a conversation, the way that changes least first."""
    whole = tuple(complete_tool(tool) for tool in choice.tools)
    careful = replace(CAREFUL, content=traits.content)
    if whole == choice.tools:
        return [(prompt, traits), (prompt, careful)]
    completed = prompt.with_tools(whole)
    return [(prompt, traits), (completed, traits), (completed, careful)]


class _Prompt:
    """Renders the turns of one request."""

    def __init__(self, assets: Assets, tools: Tools, keywords: Mapping[str, Any], owner: str) -> None:
        self._assets = assets
        self._tools = tools
        self._keywords = keywords
        self._owner = owner

    def with_tools(self, tools: Tools) -> _Prompt:
        """Return the same with other tools."""
        return _Prompt(self._assets, tools, self._keywords, self._owner)

    async def render(self, turns: Sequence[Turn], traits: TemplateTraits) -> str:
        """Render turns for a template with these traits. Raises TemplateFailed, QueueFull."""
        fitted = fit(turns, tools=self._tools, traits=traits, wording=wording(self._assets.chat))
        tools = {"tools": list(fitted.tools)} if fitted.tools else {}
        return await self._assets.render(fitted.turns, owner=self._owner, **self._keywords, **tools)

    async def explain(self, turns: Sequence[Turn], traits: TemplateTraits, failed: TemplateFailed) -> TemplateFailed:
        """Return an error that names the first turn that the template refuses; some 10 renderings at most."""
        low, high = 0, len(turns)  # the template takes the first ``low`` turns, and refuses the first ``high``
        while high - low > 1:
            middle = (low + high) // 2
            try:
                await self.render(turns[:middle], traits)
                low = middle
            except TemplateFailed as earlier:
                failed, high = earlier, middle
        what = f"the model's chat template refuses messages.{high - 1}, of role '{turns[high - 1]['role']}'"
        return TemplateFailed(what, fact=failed.fact, next_step=failed.next_step)


def _roles(turns: Sequence[Turn]) -> str:
    return " ".join(turn["role"] for turn in turns[-16:])


def wording(chat: ChatFormat) -> Wording:
    """Return the texts for what a template cannot write, in the format of the model's answers."""
    return Wording(
        write_calls=lambda calls: chat.write([Call(name, arguments) for name, arguments in calls]),
        describe_tools=lambda tools: tool_instructions(tools, chat),
    )


def tool_instructions(tools: Tools, chat: ChatFormat = HERMES) -> str:
    """Describe the tools to a model whose chat template does not, and ask for calls in the model's format."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = chat.write([Call("function name", {"argument": "value"})])
    return (
        "You may call functions to answer. Their signatures stand between <tools> and </tools>:\n"
        f"<tools>\n{lines}\n</tools>\n"
        f"To call one, write its name and arguments in this form:\n{example}"
    )


def client_turns(messages: Sequence[Message]) -> list[Turn]:
    """Convert messages for ``fit``: missing content stays null, a call's arguments are values, functions are tools.

    Older clients call tools "functions". Some clients call reasoning ``reasoning``.
    """
    return [_turn(message) for message in messages]


def _turn(message: Message) -> Turn:
    fields = message.model_dump(exclude_none=True) | {"content": message.content}
    reasoning = fields.pop("reasoning", None)
    if reasoning is not None:
        fields.setdefault("reasoning_content", reasoning)
    if message.role == "function":
        fields["role"] = "tool"
    if (function := fields.pop("function_call", None)) is not None:
        fields["tool_calls"] = [*fields.get("tool_calls", ()), {"id": "", "type": "function", "function": function}]
    for call in fields.get("tool_calls", ()):
        call["function"]["arguments"] = _arguments(call["function"]["arguments"])
    return fields


def _arguments(text: str) -> object:
    """Return the arguments of a call: an object, a list, or text as it is, such as that of a call that was cut off."""
    try:
        value: object = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    if value is None:
        return {}
    return cast("object", value) if isinstance(value, dict | list) else text
