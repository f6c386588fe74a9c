"""Commands in messages can be typed: their verbs, options and arguments exist. Help is whole."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import edgepipe
from tests.support.processes.every_verb import every_verb

PACKAGE = Path(edgepipe.__file__).parent
SOURCES = sorted(set(PACKAGE.rglob("*.py")) - {PACKAGE / "cli" / "usage.py"})  # which adds what was typed
COMMAND = re.compile(r"(?<![\w/.-])edgepipe((?: [^\s'\"(),;`]+)+)")
VALUE = "VALUE"  # for an expression in an f-string


def test_commands_in_messages_can_be_typed() -> None:
    root = every_verb()
    checked = 0
    codes = {source: source.read_text(encoding="utf-8") for source in SOURCES}
    for source, code in codes.items():
        for line, text in messages(ast.parse(code)) if COMMAND.search(code) else ():
            for words in COMMAND.findall(text):
                command, rest = found(root, words.split())
                if command is not root and not hasattr(command, "commands"):  # else a name in a sentence
                    assert not wrong(command, rest), f"{source}:{line}: edgepipe{words}: {wrong(command, rest)}"
                    checked += 1
    assert checked > 100


def test_lists_of_verbs_cut_no_sentence_at_80_columns() -> None:
    groups = [every_verb()]
    for group in groups:
        verbs: dict[str, Any] = getattr(group, "commands", {})
        groups += verbs.values()
        room = 80 - max(map(len, verbs), default=0) - len("    ") - 2
        assert [name for name, verb in verbs.items() if verb.get_short_help_str(room).endswith("...")] == []


def messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Texts of a module with their lines, except its docstrings and single words."""
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    inner |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) in inner:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else VALUE for part in node.values)
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def found(command: Any, words: list[str]) -> tuple[Any, list[str]]:
    """The verb that the words name, and the other words."""
    while words and words[0] in getattr(command, "commands", ()):
        command, words = command.commands[words[0]], words[1:]
    return command, words


def wrong(command: Any, words: list[str]) -> str:
    """What typer would refuse; empty for nothing."""
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}
    if unknown := [word for word in words if word.startswith("-") and word.rstrip(".") not in known]:
        return f"no option {unknown}"
    needed = [each for each in command.params if each.param_type_name == "argument" and each.required]
    given = [word for word in words if not word.startswith("-")]
    return "" if len(given) >= len(needed) or "--help" in words else f"no {needed[0].name}"
