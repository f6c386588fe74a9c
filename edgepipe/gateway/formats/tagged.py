"""Calls whose arguments are bare text between tags: a reader and grammars for all formats of this kind.

An argument's text becomes JSON of the type that the function's schema names. Arguments that can only be strings are
passed on as they arrive.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgepipe.gateway.formats.chat_format import CallForm, ChatFormat, Functions
from edgepipe.gateway.formats.content import AnswerContent
from edgepipe.gateway.formats.json_calls import any_call, free_start, lazy_opening, overlap
from edgepipe.gateway.formats.typed_values import Schema, argument_schema, kinds, typed_json
from edgepipe.gateway.tool_call_json import CallNews
from edgepipe.gateway.tool_calls import Call, Scanned
from edgepipe.sampling.grammar import json_rule

_MAX_HEAD_CHARS = 512  # longest tag with its name; a longer text is no call
_STRING = frozenset({"string"})
_NAMED = ("$defs", "definitions")  # schemas that an argument's schema may refer to


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """How a format writes calls. In ``call`` and ``argument``, ``NAME`` is the place of the name.

    Grammars and written calls have the layout's spaces; the reader takes any.
    """

    opening: str  # tag before a group of calls
    closing: str  # tag after the group
    call: str  # tag before a call's arguments
    call_end: str  # tag after the arguments; empty: the group ends with its one call
    argument: str  # tag before an argument's text
    argument_end: str
    call_reading: re.Pattern[str]  # the name is group 1
    argument_reading: re.Pattern[str]  # the name is group 1; group 2, if any, is "true" for strings
    one_call: bool = False  # models write one call in a group; several are read, too
    may_lack_opening: bool = False  # a call may begin without the opening, as some models write it
    before_call: str = ""  # layout: spaces after the opening
    before_argument: str = ""  # spaces before each argument
    around_text: str = ""  # spaces on both sides of an argument's text, no part of it
    before_call_end: str = ""
    before_closing: str = ""
    no_arguments: str = ""  # spaces in a call without arguments, besides
    tokens: tuple[str, ...] = ()  # parts of the tags that are tokens

    @property
    def has_one_call(self) -> bool:
        """Whether models write one call in a group."""
        return self.one_call or not self.call_end

    @property
    def group_end(self) -> str:
        """What a model writes after the last call."""
        return f"{self.before_closing if self.call_end else ''}{self.closing}"

    @property
    def marks(self) -> tuple[str, ...]:
        """Tokens of the format."""
        return (self.opening, self.closing, *re.findall(r"<[^<>=\s]+>", self.argument), self.argument_end, *self.tokens)


class TaggedReader:
    """Reads calls as they arrive; see TextReader.

    Content ends at an opening that a function's name follows. In a call that has begun, text outside arguments is
    dropped.
    """

    def __init__(self, tags: Tags, calls: CallNews, functions: Functions) -> None:
        self._tags = tags
        self._calls = calls
        self._functions = functions
        self._state: Callable[[str, int], int] = self._text
        self._pending = ""  # text that may be an incomplete tag
        self._marks: list[str] = []  # tags since the content ended; content if no call follows
        self._content = AnswerContent()
        self._schema: Schema = {}  # the current function's parameters
        self._argument = _Argument(calls, _STRING, before="")
        self._ending = ""  # text that ends the argument; chosen at the argument's beginning
        self._num_arguments = 0
        self._starts = (tags.opening, _before_name(tags.call)) if tags.may_lack_opening else (tags.opening,)
        self._start = re.compile("|".join(map(re.escape, self._starts)))
        self._after_call = (tags.closing, _before_name(tags.call))
        self._in_a_call = (_before_name(tags.argument), tags.call_end or tags.closing, tags.closing)

    @property
    def in_call(self) -> bool:
        """See TextReader."""
        return self._state not in (self._text, self._between)

    def push(self, text: str) -> Scanned:
        """See TextReader."""
        text, self._pending = self._pending + text, ""
        at = 0
        while at < len(text):
            at = self._state(text, at)
        return Scanned(self._content.take(), self._calls.take())

    def finish(self, *, followed_by: str | None = None) -> Scanned:
        """See TextReader."""
        held = self._pending if self._state in (self._text, self._between) else ""
        if self._state == self._head and followed_by is None:
            held = "".join([*self._marks, self._pending])
        if self._state == self._text and followed_by is not None and held and self._may_open(held + followed_by):
            held = ""
        if self._state == self._between and begins(held, 0, self._after_call):
            held = ""
        self._content.add(held)
        self._content.end(keep_spaces=not self._calls.count)
        self._marks, self._pending = [], ""
        return Scanned(self._content.take(), self._calls.take())

    def _may_open(self, text: str) -> bool:
        return begins(text, 0, self._starts)

    def _text(self, text: str, at: int) -> int:
        """State: content, until the opening, or until a call that lacks it."""
        if found := self._start.search(text, at):
            self._content.add(text[at : found.start()])
            self._state = self._head
            opened = found.group() == self._tags.opening
            self._marks = [self._tags.opening] if opened else []
            return found.end() if opened else found.start()
        keep = max(overlap(text, at, start) for start in self._starts)
        self._content.add(text[at : len(text) - keep])
        self._pending = text[len(text) - keep :]
        return len(text)

    def _head(self, text: str, at: int) -> int:
        """State: after the opening, before the first call's name."""
        found, end = self._match(self._tags.call_reading, text, at)
        if found is not None and found[1] in self._functions:
            self._begin(found[1])
            return end
        if found is None and self._held(text, at):
            return len(text)
        # A call that lacks the opening shows its first character, so that reading goes on.
        shown = "".join(self._marks) or text[at]
        self._content.add(shown)
        end = at if self._marks else at + len(shown)
        self._marks, self._state = [], self._text
        return end

    def _begin(self, name: str) -> None:
        self._content.drop_spaces()
        self._marks = []
        self._schema, self._num_arguments = self._functions[name], 0
        self._calls.begin(name)
        self._state = self._call

    def _call(self, text: str, at: int) -> int:
        """State: in a call, outside its arguments."""
        if text[at] != "<":
            found = text.find("<", at)
            return found if found >= 0 else len(text)
        argument, end = self._match(self._tags.argument_reading, text, at)
        if argument is not None:
            self._open_argument(argument)
            return end
        for mark in filter(None, (self._tags.call_end, self._tags.closing)):
            if text.startswith(mark, at):
                self._end_call()
                self._state = self._between if mark == self._tags.call_end else self._text
                return at + len(mark)
        if begins(text, at, self._in_a_call) and self._held(text, at):
            return len(text)
        return at + 1

    def _open_argument(self, found: re.Match[str]) -> None:
        name = found[1].strip()
        schema = argument_schema(self._schema, name)
        allowed = kinds(self._schema, schema)
        if found.re.groups > 1 and allowed != _STRING:  # the model says whether it wrote a string
            allowed = _STRING if found[2] == "true" else allowed - _STRING or allowed
        self._calls.arguments(("{" if not self._num_arguments else ", ") + json.dumps(name, ensure_ascii=False) + ": ")
        self._num_arguments += 1
        self._argument, self._ending = _Argument(self._calls, allowed, before=self._tags.around_text), ""
        self._state = self._value

    def _value(self, text: str, at: int) -> int:
        """State: in an argument's text.

        A text that begins on a line of its own also ends on one: a tag within a line is part of it.
        """
        if not self._ending:
            around = self._tags.around_text if text.startswith(self._tags.around_text, at) else ""
            self._ending = around + self._tags.argument_end
        found = text.find(self._ending, at)
        if found >= 0:
            self._argument.add(text[at:found])
            self._argument.end()
            self._state = self._call
            return found + len(self._ending)
        keep = overlap(text, at, self._ending)
        self._argument.add(text[at : len(text) - keep])
        self._pending = text[len(text) - keep :]
        return len(text)

    def _end_call(self) -> None:
        self._calls.arguments("}" if self._num_arguments else "{}")

    def _between(self, text: str, at: int) -> int:
        """State: after a call, in its group."""
        if text[at].isspace():
            return at + 1
        if text.startswith(self._tags.closing, at):
            self._state = self._text
            return at + len(self._tags.closing)
        found, end = self._match(self._tags.call_reading, text, at)
        if found is not None and found[1] in self._functions:
            self._begin(found[1])
            return end
        if found is None and begins(text, at, self._after_call) and self._held(text, at):
            return len(text)
        self._state = self._text
        return at

    def _match(self, reading: re.Pattern[str], text: str, at: int) -> tuple[re.Match[str] | None, int]:
        found = reading.match(text, at, at + _MAX_HEAD_CHARS)
        return found, found.end() if found is not None else at

    def _held(self, text: str, at: int) -> bool:
        """Keep the text for the next piece if it may be an incomplete tag."""
        if len(text) - at >= _MAX_HEAD_CHARS:
            return False
        self._pending = text[at:]
        return True


class _Argument:
    """One argument's text as it becomes JSON."""

    def __init__(self, calls: CallNews, allowed: frozenset[str], *, before: str) -> None:
        """``before``: spaces before the text that are no part of it."""
        self._calls = calls
        self._allowed = allowed
        self._before = before
        self._parts: list[str] = []  # text of a value whose type shows at its end
        self._begun = False

    def add(self, text: str) -> None:
        """Take a part of the text."""
        if self._allowed != _STRING:
            self._parts.append(text)
            return
        if not self._begun and text:
            self._begun = True
            self._calls.arguments('"')
            text = text.removeprefix(self._before)
        self._calls.arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    def end(self) -> None:
        """Take the end of the text."""
        if self._allowed == _STRING:
            self._calls.arguments('"' if self._begun else '""')
            return
        self._calls.arguments(typed_json("".join(self._parts).removeprefix(self._before), self._allowed))


def begins(text: str, at: int, marks: Sequence[str]) -> bool:
    """Return whether ``text[at:]`` begins one of the marks, or is the beginning of one."""
    return any(text.startswith(mark, at) or mark.startswith(text[at : at + len(mark)]) for mark in marks)


def _before_name(tag: str) -> str:
    """Return a tag up to its name, without the quote that some models leave out."""
    return tag.partition("NAME")[0].rstrip('"')


def tagged_format(name: str, tags: Tags) -> ChatFormat:
    """Make the format of these tags."""
    return ChatFormat(
        name=name,
        marks=tags.marks,
        new_reader=lambda calls, functions: TaggedReader(tags, calls, functions),
        call_rules=lambda functions, form: _rules(tags, functions, form),
        write=lambda calls: _write(tags, calls),
    )


def _write(tags: Tags, calls: Sequence[Call]) -> str:
    bodies = [f"{tags.before_call}{_written_call(tags, call)}" for call in calls]
    groups = bodies if tags.has_one_call else ["".join(bodies)]
    return "\n".join(f"{tags.opening}{body}{tags.group_end}" for body in groups)


def _written_call(tags: Tags, call: Call) -> str:
    arguments = [
        f"{tags.before_argument}{_head(tags, name, value)}{tags.around_text}{_bare(value)}{tags.around_text}"
        f"{tags.argument_end}"
        for name, value in call.arguments.items()
    ]
    body = "".join(arguments) or tags.no_arguments
    return f"{_named(tags.call, call.name)}{body}{tags.before_call_end}{tags.call_end}"


def _head(tags: Tags, name: str, value: object) -> str:
    return _named(tags.argument, name).replace("KIND", "true" if isinstance(value, str) else "false")


def _bare(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _named(text: str, name: str) -> str:
    return text.replace("NAME", name)


def _rules(tags: Tags, functions: Functions, form: CallForm) -> list[str]:
    """Bind names, and arguments in the order of the schema. Lengths and patterns of strings are free."""
    found = [_call_rules(tags, index, name, schema) for index, (name, schema) in enumerate(functions.items())]
    calls = [any_call(len(found)), *(rule for rules in found for rule in rules)]
    calls.append(f"text[lazy]: ANYTHING {_quoted(tags.around_text + tags.argument_end)}")
    more = f"({_spaces(tags.before_call)} call)*" if form.several and not tags.has_one_call else ""
    body = f"{_spaces(tags.before_call)} call {more} {_spaces(tags.before_closing)} {_quoted(tags.closing)}"
    again = r" (/\n{0,2}/ forced)*" if form.several and tags.has_one_call else ""
    if form.forced:
        return [f"answer: forced{again}", f"forced: {_quoted(tags.opening)} {body}", *calls]
    return [free_start("tag", several=form.several), f"tag: opening {body}", lazy_opening(tags.opening), *calls]


def _call_rules(tags: Tags, index: int, name: str, schema: Schema) -> list[str]:
    rules: list[str] = []
    parts: list[str] = []
    required = schema.get("required") or ()
    properties: Mapping[str, Schema] = schema.get("properties") or {}
    for place, (argument, described) in enumerate(properties.items()):
        rule = f"argument_{index}_{place}"
        rules.append(f"{rule}: {_argument_rule(tags, schema, argument, described)}")
        parts.append(rule if argument in required else f"{rule}?")
    if schema.get("additionalProperties", True) is not False:
        rules.append(f"other_{index}: {_other_rule(tags)}")
        parts.append(f"other_{index}*")
    arguments = " ".join(parts)
    if tags.no_arguments and all(part.endswith(("?", "*")) for part in parts):
        arguments = f"({arguments} | {_quoted(tags.no_arguments)})" if parts else _spaces(tags.no_arguments)
    body = f"{_quoted(_named(tags.call, name))} {arguments}"
    end = f"{_spaces(tags.before_call_end)} {_quoted(tags.call_end)}" if tags.call_end else ""
    return [f"call_{index}: {body} {end}", *rules]


def _argument_rule(tags: Tags, root: Schema, name: str, schema: Schema) -> str:
    allowed = kinds(root, schema)
    around = f" {_quoted(tags.around_text)}" if tags.around_text else ""
    end = f"{around} {_quoted(tags.argument_end)}"
    texts = _texts(schema) if allowed == _STRING else ()
    if texts:
        text = f"({' | '.join(_quoted(text) for text in texts)}){end}"
    elif "string" in allowed:
        text = "text"
    else:
        named = {key: root[key] for key in _NAMED if key in root}
        text = f"{json_rule(named | dict(schema) if _refers_to(schema, named) else {})}{end}"
    tag = _named(tags.argument, name)
    heads = ["true"] * ("string" in allowed) + ["false"] * (allowed != _STRING)
    head = " | ".join(dict.fromkeys(_tag_rule(tag.replace("KIND", kind)) for kind in heads))
    return f"{_spaces(tags.before_argument)} ({head}){around} {text}"


def _tag_rule(tag: str) -> str:
    """Return the rule of a tag, in which line breaks are optional."""
    return r' "\n"? '.join(_quoted(part) for part in tag.split("\n"))


def _refers_to(schema: Schema, named: Schema) -> bool:
    """Return whether all references of a schema are to these parts."""
    targets = re.findall(r'"\$ref": "#/([^/"]*)', json.dumps(schema))
    return all(target in named for target in targets) and '"$ref": "#"' not in json.dumps(schema)


def _other_rule(tags: Tags) -> str:
    """Return the rule of an argument that the schema does not name."""
    before, _, after = tags.argument.partition("NAME")
    after = after.replace("KIND", "true")
    around = f" {_quoted(tags.around_text)}" if tags.around_text else ""
    return f'{_spaces(tags.before_argument)} {_quoted(before)} /[^<>"=\\n]{{1,64}}/ {_tag_rule(after)}{around} text'


def _texts(schema: Schema) -> Sequence[str]:
    """Return the strings of an enumeration; empty for other schemas."""
    values: Any = [schema["const"]] if "const" in schema else schema.get("enum") or ()
    return [value for value in values if isinstance(value, str)]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _spaces(text: str) -> str:
    return f"{_quoted(text)}?" if text else ""
