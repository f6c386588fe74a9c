"""Outputs of models: what a chat template writes of a turn, and random outputs of the grammars that bind calls.

An output is read whole, by characters and by threes, and its turn is rendered back. Equal text has equal tokens.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jinja2 import TemplateError

from edgepipe.errors import EdgepipeError
from edgepipe.gateway.answer_reader import AnswerFormat, AnswerReader
from edgepipe.gateway.conversation import client_turns, wording
from edgepipe.gateway.formats.chat_format import ChatFormat, Reasoning
from edgepipe.gateway.formats.detect import detect_format
from edgepipe.gateway.schema import Message
from edgepipe.gateway.structured import GrammarCompiler, plan_output
from edgepipe.gateway.tool_calls import Call, joined_calls
from edgepipe.gateway.tool_choice import ToolChoice, choose_tools
from edgepipe.sampling import GrammarSpec
from edgepipe.sampling.grammar import GrammarTokenizer
from edgepipe.text.conversations.efforts import keywords_of
from edgepipe.text.conversations.fitting import fit
from edgepipe.text.template_child import make_environment
from tests.support.gateways.grammar_walks import Walk
from tests.support.gateways.template_traits import traits_of

Calls = list[tuple[str, Any]]

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
ENDS = (
    *(
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<|return|>",
        "<|call|>",
    ),
    *("<｜end▁of▁sentence｜>", "<end_of_turn>", "<turn|>", "<|tool_response>", "<|END_OF_TURN_TOKEN|>", "</s>"),
    *("<seed:eos>", "[e~[", "<｜tool▁outputs▁begin｜>", "<|observation|>", "<|user|>", "<SPECIAL_12>"),
)
"""Texts that end a turn."""

ODD = "He said: \"yes\",\n\tC:\\dir\n</a> {x} [y] 'z' é 漢字 😀 & <b> 100%"


def _tool(name: str, properties: dict[str, dict[str, Any]], *required: str) -> dict[str, Any]:
    described = {key: {"description": "A value.", **schema} for key, schema in properties.items()}
    parameters = {"type": "object", "properties": described, "required": [*required]}
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": parameters}}


_OPTIONS = {
    "mode": {"type": "string", "enum": ["a", "w"]},
    "lines": {"type": "array", "items": {"type": "string"}},
    "empty": {"type": "object", "properties": {}},
    "exact": {"type": "boolean"},
}
TOOLS: list[dict[str, Any]] = [
    _tool("get_weather", {"city": {"type": "string"}, "days": {"type": "integer"}}, "city"),
    _tool(
        "write_file",
        {
            "path": {"type": "string"},
            "text": {"type": "string"},
            "options": {"type": "object", "properties": _OPTIONS, "required": ["mode", "lines"]},
        },
        "path",
        "text",
    ),
    _tool("now", {}),
    _tool(
        "list-all",
        {
            "flags": {"type": "array", "items": {"type": "boolean"}},
            "größe": {"type": "integer"},
            "kind": {"type": "string", "enum": ["é", 'a "b"', "c"]},
            "share": {"type": "number"},
        },
    ),
]


FAILURES = (TemplateError, EdgepipeError, ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""What rendering may raise."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What an output says."""

    content: str = ""
    reasoning: str = ""
    calls: Calls = field(default_factory=list[tuple[str, Any]])

    def message(self) -> dict[str, Any]:
        """The turn as a client sends it back."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{place}",
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments)},
                }
                for place, (name, arguments) in enumerate(self.calls)
            ]
        return message


TURNS = {
    "text": Turn(content="Hello, world!\nWhat's up?"),
    "thought": Turn(content="It is 5.", reasoning="The user asks.\n\nI add."),
    "call": Turn(calls=[("get_weather", {"city": "Rome", "days": 3})]),
    "text and call": Turn(content="I look.", calls=[("get_weather", {"city": "Rome"})]),
    "no arguments": Turn(calls=[("now", {})]),
    "two calls": Turn(calls=[("get_weather", {"city": "Rome"}), ("now", {})]),
    "odd call": Turn(calls=[("write_file", {"path": "", "text": ODD, "options": {"mode": "a", "lines": ["", ODD]}})]),
    "thought and call": Turn(reasoning="I look.", calls=[("list-all", {"flags": [True, False], "größe": 5})]),
}


@dataclass(frozen=True, kw_only=True)
class Output:
    """A text that a model writes after a prompt."""

    text: str
    in_reasoning: bool = False
    meant: Turn | None = None  # None: only the text is known


class Family:
    """A chat template, as edgepipe uses it."""

    def __init__(self, source: str) -> None:
        self._template = make_environment().from_string(source)
        self.traits = traits_of(source).choose(tools=True)
        self.chat: ChatFormat = detect_format(source)
        self.choice: ToolChoice = choose_tools(TOOLS)

    def prompt(self, turns: Sequence[Mapping[str, Any]], *, generate: bool) -> str:
        """Render a conversation. Raises TemplateError and what templates raise."""
        messages = client_turns([Message.model_validate(turn) for turn in turns])
        shown = fit(messages, tools=TOOLS, traits=self.traits, wording=wording(self.chat))
        keywords = keywords_of({}, None, self.traits) | ({"tools": list(shown.tools)} if shown.tools else {})
        return self._template.render(messages=shown.turns, add_generation_prompt=generate, **SPECIAL, **keywords)

    def written(self, turn: Turn, *, is_last: bool = False) -> Output:
        """Return what the template writes of a turn, in place of an answer. ``is_last``: without results after it."""
        asked = {"role": "user", "content": "Hi."}
        answer = turn.message()
        prompt = self.prompt([asked], generate=True)
        results = [
            {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": "ok"}
            for call in answer.get("tool_calls", ())
        ]
        later = [] if is_last else results or [asked]
        rendered = self.prompt([asked, answer, *later], generate=not is_last)
        text, inside = self.continued(prompt, rendered)
        return Output(text=text, in_reasoning=inside, meant=_kept(turn, text))

    def continued(self, prompt: str, rendered: str) -> tuple[str, bool]:
        """Return the turn that follows a prompt in a later one, and whether it begins within reasoning.

        Raises ValueError if the later prompt does not begin with the earlier one.
        """
        for base in self._bases(prompt):
            if rendered.startswith(base):
                text = _bare(rendered[len(base) :], channels=self.chat.has_channels)
                return text, self._continues_reasoning(base, text)
        raise ValueError("the answer does not follow the prompt")

    def _bases(self, prompt: str) -> Iterator[str]:
        """Yield the prompt, then without the reasoning that it begins."""
        yield prompt
        marks = self.chat.reasoning or Reasoning("<think>", "</think>")
        opened = prompt.rstrip().removesuffix(marks.closing).rstrip()
        for opening in (marks.opening + marks.label, marks.opening):
            if opened.rstrip().endswith(opening):
                yield opened.rstrip().removesuffix(opening)
                yield opened.rstrip().removesuffix(opening).rstrip()
        yield prompt.rstrip().removesuffix(marks.closing)

    def _continues_reasoning(self, prompt: str, text: str) -> bool:
        marks = self.chat.reasoning
        ended = marks is not None and text.lstrip().startswith(marks.closing)
        return ended or self.chat.opens_reasoning(prompt)

    def read(self, output: Output, size: int) -> Turn:
        """Read an output in pieces of this size."""
        answer = AnswerFormat(chat=self.chat, functions=self.choice.functions, in_reasoning=output.in_reasoning)
        reader = AnswerReader(answer, new_id=str)
        found = [reader.push(output.text[i : i + size]) for i in range(0, len(output.text), size)]
        found.append(reader.finish())
        calls = joined_calls(call for part in found for call in part.calls)
        return Turn(
            content="".join(part.content for part in found),
            reasoning="".join(part.reasoning for part in found),
            calls=[(call.name, _value(call.arguments)) for call in calls],
        )

    async def walked(self, rng: random.Random, vocabulary: GrammarTokenizer) -> Output | None:
        """Return random calls, as the grammar allows and the template writes them; None if they get too long."""
        plain = self.written(TURNS["no arguments"])
        spec = await self.grammar(several=self._takes_several() and rng.random() < 0.5)
        lines = "\n" in self.written(TURNS["call"]).text.strip()
        marks = () if self.chat.has_channels else self.chat.marks
        walk = Walk(vocabulary, spec, rng, sample=self._sample(), marks=marks, lines=lines)
        text = walk.run(" to=functions." if self.chat.has_channels else "")
        if text is None:
            return None
        first = 0 if self.chat.has_channels else max(0, plain.text.find(self.chat.write([Call("now", {})])[:8]))
        return Output(text=plain.text[:first] + text, in_reasoning=plain.in_reasoning)

    def _takes_several(self) -> bool:
        """Return whether the template writes several calls in a turn."""
        try:
            return len(self.read(self.written(TURNS["two calls"]), 3).calls) > 1
        except FAILURES:
            return False

    def _sample(self) -> str:
        options = {"mode": "w", "lines": ["a", "b"], "empty": {}, "exact": False}
        calls = [
            ("now", {}),
            ("get_weather", {"city": "a", "days": 1}),
            ("list-all", {"flags": [True], "größe": 1, "kind": "c", "share": 1}),
            ("list-all", {"share": 1}),
            ("list-all", {}),
            ("write_file", {"path": "a", "text": "b", "options": options}),
        ]
        several = [[first, second] for first in calls for second in calls]
        texts: list[str] = []
        for turn in [
            *TURNS.values(),
            *(Turn(calls=each) for each in ([call] for call in calls)),
            *(Turn(calls=each) for each in several),
        ]:
            with contextlib.suppress(*FAILURES):
                texts.append(self.written(turn).text)
        return "\0".join(texts)

    async def grammar(self, *, several: bool) -> GrammarSpec:
        """Return the grammar of an answer that must be calls."""

        async def check(grammar: GrammarSpec, owner: str) -> None:
            del grammar, owner

        choice, chat = choose_tools(TOOLS, "required", several), replace(self.chat, reasoning=None)
        plan = await plan_output(choice=choice, chat=chat, compiler=GrammarCompiler(check))
        assert plan.grammar is not None
        return plan.grammar


def _kept(turn: Turn, text: str) -> Turn:
    """Return the parts of a turn that a template writes in it: some leave out content beside calls, or reasoning.

    Others have one call in a turn, or content and calls in turns of their own.
    """
    content, reasoning = (part if part in text else "" for part in (turn.content, turn.reasoning))
    return Turn(content=content, reasoning=reasoning, calls=[call for call in turn.calls if call[0] in text])


def _bare(text: str, *, channels: bool) -> str:
    """Cut a turn at its end. A turn with channels has several messages."""
    if channels:
        return re.split(r"<\|(?:call|return)\|>|<\|end\|>(?=<\|start\|>user|$)", text)[0]
    return text[: min((place for end in ENDS if (place := text.find(end)) >= 0), default=len(text))]


def same_text(text: str, expected: str) -> bool:
    """Return whether two texts of a turn are equal.

    Not compared: spaces around them and before the end of a group of calls, that end of DeepSeek's groups, which a
    template leaves out before results, random ids of calls (Mistral), and the header of harmony's calls.
    """
    return _compared(text) == _compared(expected)


def _compared(text: str) -> str:
    text = re.sub(r', "id": "\w{9}"|\[CALL_ID\]\w{9}', "", text).strip()
    text = re.sub(r"\s+(?=\]?<\|END_ACTION\|>)|\s*<｜tool▁calls▁end｜>$", "", text)
    channel, kind = r"(?:<\|channel\|>\w+)?", r"(?: ?<\|constrain\|>json| json)?"
    return re.sub(rf"{channel} ?to=(functions\.[\w-]+){channel}{kind}(?=<\|message\|>)", r"to=\1", text)


def _value(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


@dataclass(kw_only=True)
class Tally:
    """Counts of one template's outputs, with what was wrong."""

    written: int = 0  # calls that the template wrote
    random: int = 0
    cut_alike: int = 0  # read the same whole, by characters and by threes
    meant: int = 0  # calls among these that were read as what was meant
    same: int = 0  # rendered back as the same text
    faults: list[str] = field(default_factory=list[str])

    @property
    def outputs(self) -> int:
        """All outputs."""
        return self.written + self.random


async def tally(family: Family, vocabulary: GrammarTokenizer, *, num_random: int, seed: str) -> Tally:
    """Read the outputs of one template, and render their turns back."""
    counts = Tally()
    for name, turn in TURNS.items():
        try:
            output = family.written(turn)
        except FAILURES as exc:
            counts.faults.append(f"{name}: refused: {exc}"[:200])
            continue
        counts.written += 1
        _count(counts, family, output, name)
    for number in range(num_random):
        output = await family.walked(random.Random(f"{seed}/{number}"), vocabulary)
        if output is not None:
            counts.random += 1
            _count(counts, family, output, f"random {number}")
    return counts


def _count(counts: Tally, family: Family, output: Output, name: str) -> None:
    whole, *cut = [family.read(output, size) for size in (len(output.text) or 1, 1, 3)]
    counts.cut_alike += cut == [whole, whole]
    if cut != [whole, whole]:
        counts.faults.append(f"{name}: cuts change {output.text!r}")
    stripped = replace(whole, content=whole.content.strip())
    if output.meant is not None:
        counts.meant += stripped == output.meant
        if stripped != output.meant:
            counts.faults.append(f"{name}: {output.text!r} is read as {whole}")
    try:
        back = family.written(whole).text
    except FAILURES as exc:
        counts.faults.append(f"{name}: refused back: {exc}"[:200])
        return
    counts.same += same_text(back, output.text)
    if not same_text(back, output.text):
        counts.faults.append(f"{name}: {output.text!r} is rendered back as {back!r}")
