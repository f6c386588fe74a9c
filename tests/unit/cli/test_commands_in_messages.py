"""Messages and docstrings name only commands and options that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from tests.unit.cli.test_commands_in_docs import ROOT, flags_of, root, unknown

PLACES = ("edgepipe", "backends")
OF_OTHER_PROGRAMS = frozenset(  # firewall-cmd, systemctl, loginctl, launchctl, journalctl, pip, uv, git, nvcc
    "--permanent --add-port --add-service --reload --shutdown --upgrade --user --property --unit --no-pager --now"
    " --no-deps --no-input --only-binary --disable-pip-version-check --retries --timeout --dest --progress-bar"
    " --python --index --index-url --no-index --find-links --upgrade-package --reinstall-package --torch-backend"
    " --force-reinstall --default-index --quiet --ff-only --gpu-architecture --std --profile".split()  # codex
)
PROSE = ("answers", "runs", "uses", "was")  # behind "edgepipe node", which is a noun there
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]\b")
_COMMAND = re.compile(r"(['`]?)\bedgepipe((?: (?:--)?[a-z][a-z-]+)+)")


def texts(source: str) -> Iterator[tuple[int, str]]:
    """The strings of a module with their lines; values in an f-string are X."""
    inner: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            inner |= {id(part) for part in node.values}
            yield (
                node.lineno,
                "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values),
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node.lineno, node.value


@cache
def all_flags() -> frozenset[str]:
    flags, left = set[str](), [root()]
    while left:
        command = left.pop()
        left += getattr(command, "commands", {}).values()
        flags |= flags_of(command)
    return frozenset(flags) | {"--help"}


def wrong_in(text: str) -> list[str]:
    found = [option for option in _OPTION.findall(text) if option not in all_flags() | OF_OTHER_PROGRAMS]
    for quote, words in ((match[1], match[2].split()) for match in _COMMAND.finditer(text)):
        if quote or words[0] in root().commands:  # else "edgepipe" is a noun
            found += [word for word in unknown(words) if word not in PROSE]
    return found


def test_messages_and_docstrings_name_commands_and_options_that_exist() -> None:
    paths = [path for place in PLACES for path in sorted((ROOT / place).rglob("*.py")) if "wire/v1" not in str(path)]
    assert [
        f"{path.relative_to(ROOT)}:{line}: {', '.join(wrong)}"
        for path in paths
        for line, text in texts(path.read_text(encoding="utf-8"))
        if (wrong := wrong_in(text))
    ] == []


def test_the_check_finds_what_does_not_exist() -> None:
    assert wrong_in("give --nodez 3") == ["--nodez"]
    assert wrong_in("see 'edgepipe models fetch x'") == ["fetch"]
    assert wrong_in("see 'edgepipe stauts'") == ["stauts"]
    assert wrong_in("edgepipe node drain --undo; edgepipe keeps it --json") == []
    (found,) = texts("f'--nodez {1 + 1} and {2}'")
    assert found == (1, "--nodez X and X")
