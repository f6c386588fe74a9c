"""Finds words that make sentences hard to read, in docs, help texts, messages, docstrings and comments. Fails on any.

``docs/reference.md`` is generated from help texts and docstrings, so it is not read a second time.
"""

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORDS = re.compile(
    r"\b(?:whoever|whomever|whom|somebody|nobody|shall|likewise|(?:is|are) none|(?:is|are) told|gives? way)\b",
    re.IGNORECASE,
)
SKIPPED = {"docs/reference.md", "scripts/check_prose.py"}


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Each line of a file that people read, with its number: all of Markdown, comments of proto and Python, strings."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from enumerate(text.splitlines(), start=1)
        return
    if path.suffix == ".proto":
        yield from ((number, line.partition("//")[2]) for number, line in enumerate(text.splitlines(), start=1))
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield from enumerate(token.string.splitlines(), start=token.start[0])


def findings() -> list[str]:
    """``path:line: words`` of every line with such a word."""
    paths = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("proto/**/*.proto"),
        *ROOT.glob("edgepipe/**/*.py"),
        *ROOT.glob("backends/**/*.py"),
        *ROOT.glob("scripts/*.py"),
    ]
    found: list[str] = []
    for path in sorted(paths):
        relative = path.relative_to(ROOT).as_posix()
        if relative in SKIPPED or relative.startswith("edgepipe/wire/v1/"):
            continue
        for number, line in prose(path):
            if words := WORDS.findall(line):
                found.append(f"{relative}:{number}: {', '.join(words)}")
    return found


if __name__ == "__main__":
    problems = findings()
    print("\n".join(problems) or "none")
    sys.exit(bool(problems))
