"""The work of ``edgepipe models check``: what a model's chat template accepts, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from edgepipe.cli.admin import run_async
from edgepipe.cli.output import make_console, make_table, print_json, say
from edgepipe.errors import TemplateFailed
from edgepipe.gateway.conversation import wording
from edgepipe.gateway.formats.detect import detect_format
from edgepipe.safe_text import one_line
from edgepipe.store.store import ModelStore
from edgepipe.text.conversations.checking import CheckedConversation, check
from edgepipe.text.conversations.known_traits import model_traits
from edgepipe.text.conversations.learning import Ask, Rendering
from edgepipe.text.conversations.traits import ModelTraits, TemplateTraits
from edgepipe.text.template import ChatTemplate, TemplateRenderer, TemplateTimeouts
from edgepipe.text.template_reference import is_installed

_REFERENCE = "edgepipe.text.template_reference"
_REFERENCE_TIMES = TemplateTimeouts(start_s=120.0)  # the reference child imports transformers


def check_model(root: Path, model: str, *, as_json: bool) -> None:
    """Check a model's template and print the table. Raises ModelUnknown, ModelInvalid, TemplateFailed."""
    store = ModelStore(root)
    stored = store.resolve(store.meant(model))
    template = stored.card.template
    template.choose(tools=False)  # raises without a template
    traits = model_traits(stored.path, template)
    verdicts = run_async(check_template(template, traits, reference=is_installed()))
    if as_json:
        print_json({"model": stored.id, **traits.to_json(), "conversations": [one.to_json() for one in verdicts]})
        return
    _print_table(verdicts)
    say(f"{one_line(stored.id)}: {_summary(verdicts)}")
    for line in _reasoning(traits.plain):
        say(line)
    if traits.note:
        say(one_line(traits.note))


async def check_template(template: ChatTemplate, traits: ModelTraits, *, reference: bool) -> list[CheckedConversation]:
    """Render the standard conversations in child processes. ``reference``: with transformers, too."""
    chat = detect_format("\n".join(template.sources.values()))
    async with AsyncExitStack() as stack:
        own = await stack.enter_async_context(TemplateRenderer(template))
        other = await stack.enter_async_context(TemplateRenderer(template, _REFERENCE_TIMES, module=_REFERENCE))
        checking = check(traits, wording(chat), reference=reference)
        ask, by_reference = next(checking)
        while True:
            rendering = await _rendered(other if by_reference else own, ask)
            try:
                ask, by_reference = checking.send(rendering)
            except StopIteration as done:
                return done.value


async def _rendered(renderer: TemplateRenderer, ask: Ask) -> Rendering:
    tools: dict[str, Any] = {"tools": list(ask.tools)} if ask.tools else {}
    try:
        return Rendering(text=await renderer.render(ask.turns, **ask.keywords, **tools))
    except TemplateFailed as failed:
        return Rendering(refused=failed.fact or failed.what)


def _print_table(verdicts: Sequence[CheckedConversation]) -> None:
    table = make_table("CONVERSATION", "RESULT", "REPAIRS, OR WHY NOT", "TRANSFORMERS")
    for one in verdicts:
        left_out = f"left out: {', '.join(one.left_out)}" if one.left_out else ""
        cells = (one.conversation, one.outcome, one.reason or left_out or ", ".join(one.repairs))
        table.add_row(*map(one_line, cells), one.transformers or "-")
    make_console().print(table)


def _summary(verdicts: Sequence[CheckedConversation]) -> str:
    counts: dict[str, int] = {}
    for one in verdicts:
        counts[one.outcome] = counts.get(one.outcome, 0) + 1
    text = f"{len(verdicts)} conversations: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    if not any(one.transformers for one in verdicts):
        return f"{text}. To compare with transformers, install it: pip install transformers"
    return f"{text}. {sum(one.transformers == 'equal' for one in verdicts)} prompts equal those of transformers"


def _reasoning(traits: TemplateTraits) -> list[str]:
    lines: list[str] = []
    if traits.efforts:
        lines.append(f"levels of reasoning_effort: {', '.join(traits.efforts)}; others become the nearest one")
    if traits.switches:
        lines.append(f"keywords that turn reasoning on or off: {', '.join(sorted(traits.switches))}")
    return lines
