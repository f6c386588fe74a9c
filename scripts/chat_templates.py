"""Compare edgepipe's prompts with transformers' for a folder of chat templates: ``scripts/templates FOLDER``.

Each ``*.jinja`` renders the standard conversations (``edgepipe/text/conversations/probes.py``) as edgepipe serves them
and as transformers renders them unchanged. Prints tables of Markdown, per reason and per template, for
``docs/chat-templates.md``. A name with ``tool_use`` marks a template for requests with tools only. Run only templates
that you trust: no limits.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from edgepipe.gateway.conversation import wording
from edgepipe.gateway.formats.detect import detect_format
from edgepipe.text.conversations.checking import CheckedConversation, check
from edgepipe.text.conversations.learning import Ask, Rendering
from edgepipe.text.conversations.learning_child import Renderer, learned
from edgepipe.text.conversations.probes import PROBES
from edgepipe.text.conversations.traits import ModelTraits
from edgepipe.text.template_child import make_environment

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
KINDS = {
    "equal": "equal to transformers",
    "refused": "transformers refuses, edgepipe repairs",
    "faulty": "transformers leaves text out or miswrites arguments, edgepipe repairs",
    "chosen": "both complete, edgepipe writes it otherwise",
    "incomplete": "edgepipe leaves text out, too",
    "neither": "both refuse",
}
"""Kinds of a comparison."""


@dataclass(frozen=True, slots=True)
class Compared:
    """The comparisons of one template."""

    name: str
    kinds: Counter[str]
    late_system: str  # the trait: what becomes of a turn of the system behind other turns
    verdicts: Sequence[tuple[str, CheckedConversation]]  # with their kinds


def compare(path: Path) -> Compared:
    """Compare all conversations of one template."""
    source = path.read_text(encoding="utf-8").removeprefix("\ufeff")
    renderer = Renderer(make_environment().from_string(source), TOKENS, now=datetime.now)
    with_tools = learned(renderer, tools=True)
    plain = with_tools if "tool_use" in path.stem else learned(renderer, tools=False)
    traits = ModelTraits(plain=plain, with_tools=with_tools)
    checking = check(traits, wording(detect_format(source)), reference=True)
    ask, by_reference = next(checking)
    while True:
        rendering = by_transformers(source, ask) if by_reference else renderer.render(ask)
        try:
            ask, by_reference = checking.send(rendering)
        except StopIteration as done:
            verdicts: list[CheckedConversation] = done.value
            break
    chosen = [one for one in verdicts if "tool_use" not in path.stem or PROBES[one.conversation].tools]
    judged = [(kind_of(one), one) for one in chosen]
    return Compared(path.stem, Counter(kind for kind, _ in judged), with_tools.late_system, judged)


def by_transformers(source: str, ask: Ask) -> Rendering:
    """Render with transformers' own environment."""
    library: Any = importlib.import_module("transformers.utils.chat_template_utils")
    variables = {**TOKENS, **ask.keywords}
    try:
        texts, _ = library.render_jinja_template(
            [list(ask.turns)],
            tools=list(ask.tools) or None,
            documents=None,
            chat_template=source,
            add_generation_prompt=True,
            **variables,
        )
    except Exception as exc:  # templates call methods of strings and lists, which may raise any exception
        return Rendering(refused=f"{type(exc).__name__}: {exc}"[:200])
    return Rendering(text=texts[0])


def kind_of(verdict: CheckedConversation) -> str:
    """Return the kind of a comparison."""
    if verdict.outcome == "refused":
        return "neither"
    if verdict.transformers == "equal":
        return "equal"
    if verdict.outcome == "incomplete":
        return "incomplete"
    if verdict.transformers == "refused":
        return "refused"
    return "faulty" if verdict.as_sent else "chosen"


def table(compared: Sequence[Compared]) -> Iterator[str]:
    """Yield the lines of the report."""
    total = sum((one.kinds for one in compared), Counter[str]())
    versions = f"transformers {version('transformers')}, jinja2 {version('jinja2')}"
    yield f"{len(compared)} templates, {total.total()} prompts, {date.today():%Y-%m-%d}, {versions}:"
    yield ""
    yield "| column below | prompts | |"
    yield "|---|---:|---|"
    yield from (f"| {kind} | {total[kind]} | {text} |" for kind, text in KINDS.items())
    yield ""
    tagged = sum(one.late_system == "tagged" for one in compared)
    yield f"{len(compared) - tagged} templates write a later turn of the system in its place; {tagged} get it in tags."
    yield ""
    yield "The repairs where transformers renders a prompt and edgepipe renders another one:"
    yield ""
    yield "| repairs | faulty | chosen |"
    yield "|---|---:|---:|"
    reasons: dict[str, Counter[str]] = {}
    for kind, one in (judged for each in compared for judged in each.verdicts):
        if kind in ("chosen", "faulty"):
            reasons.setdefault(", ".join(one.repairs), Counter())[kind] += 1
    for reason, counts in sorted(reasons.items(), key=lambda item: -item[1].total()):
        yield f"| {reason} | {counts['faulty'] or ''} | {counts['chosen'] or ''} |"
    yield ""
    yield f"| template | {' | '.join(KINDS)} |"
    yield f"|---|{'---:|' * len(KINDS)}"
    for one in compared:
        yield f"| {one.name} | {' | '.join(str(one.kinds[kind] or '') for kind in KINDS)} |"


def main() -> None:
    """Print the report of a folder; ``--each``: the comparisons that are not equal, too."""
    folder = Path(sys.argv[1])
    compared = [compare(path) for path in sorted(folder.glob("*.jinja"))]
    print("\n".join(table(compared)))
    for one in compared if "--each" in sys.argv else ():
        for kind, verdict in one.verdicts:
            if kind != "equal":
                detail = verdict.reason or ", ".join(verdict.left_out) or ", ".join(verdict.repairs)
                print(f"{one.name}: {verdict.conversation}: {kind}: {detail}; as sent: {verdict.as_sent}")


if __name__ == "__main__":
    main()
