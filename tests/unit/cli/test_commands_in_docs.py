"""Pages for users name only commands and flags that exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.every_verb import every_verb

ROOT = Path(__file__).parents[3]
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "docs/usage.md",
    "docs/which-file.md",
    "docs/overnight.md",
    "docs/architecture.md",
    "docs/benchmarks.md",
    "docs/security.md",
    *sorted(map(str, ROOT.glob("docs/architecture/*.md"))),
    *sorted(map(str, ROOT.glob("examples/*/README.md"))),
)
PLACEHOLDERS = ("VERB", "status|logs|uninstall")
OF_OTHER_PROGRAMS = ("--config.file", "--extra", "--uninstall")  # options of Prometheus and of scripts/install.sh


@cache
def root() -> Any:
    return every_verb()


def spans(text: str) -> Iterator[str]:
    """Commands of a page: lines of its blocks of code without comments, and spans of code in its text."""
    for block in re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL):
        yield from (line.partition(" # ")[0].strip() for line in block.replace("\\\n", " ").splitlines())
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    yield from (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose))


def words_of(span: str) -> list[str]:
    """A command's words behind ``edgepipe``; empty for other text. Pages may leave ``edgepipe`` out."""
    try:
        words = shlex.split(span.replace("...", ""))
    except ValueError:
        return []
    if words[:1] == ["edgepipe"]:
        return words[1:]
    return words if len(words) > 1 and words[0] in root().commands else []


def flags_of(command: Any) -> set[str]:
    return {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}


def unknown(words: list[str]) -> list[str]:
    """The words that name no command or flag. A group's first unknown word ends the search."""
    command, wrong = root(), list[str]()
    for word in words:
        named = getattr(command, "commands", {})
        if word.startswith("-"):
            known = flags_of(command) | {"--help", "-h", "--install-completion"}
            wrong += [word] if word.partition("=")[0] not in known else []
        elif word in named:
            command = named[word]
        elif named:
            return wrong if word in PLACEHOLDERS else [*wrong, word]
    return wrong


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_commands_that_exist(page: str) -> None:
    found = [words for span in spans((ROOT / page).read_text()) if (words := words_of(span))]
    assert {" ".join(words): wrong for words in found if (wrong := unknown(words))} == {}


def test_each_flag_that_stands_alone_belongs_to_a_command() -> None:
    flags: set[str] = set()
    left = [root()]
    while left:
        command = left.pop()
        left += getattr(command, "commands", {}).values()
        flags |= flags_of(command)
    alone = {
        words[0].partition("=")[0]
        for page in PAGES
        for span in spans((ROOT / page).read_text())
        if span.startswith("--") and (words := span.split())
    }
    assert alone - flags - {"--help", *OF_OTHER_PROGRAMS} == set()


def test_the_check_finds_commands_and_flags_that_do_not_exist() -> None:
    assert unknown(["serve", "MODEL", "--nodez", "2"]) == ["--nodez"]
    assert unknown(["models", "fetch", "x"]) == ["fetch"]
    assert unknown(["node", "drain", "--undo"]) == []
