"""The child process that renders chat templates: ``python -m edgepipe.text.template_child``.

It exchanges frames of JSON on stdin and stdout (``edgepipe.children.frames``): it answers each ``{"template",
"variables"}`` with ``{"text"}`` or ``{"error", "detail"}``.

The sandbox keeps a template away from Python, but does not limit its work, so the kernel does:

- CPU: one interval timer of process time per rendering, whose signal kills even inside a single long operation.
- Memory: the address space may grow by ``MEMORY_BYTES`` over what the interpreter with jinja2 has already mapped. Where
  the kernel does not enforce it (macOS), a second timer checks the resident size between two operations.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn, Protocol, cast

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edgepipe.children.child_memory import limit_memory
from edgepipe.children.frames import answer_frames

CPU_S = 1.0
MEMORY_BYTES = 256 << 20
MAX_TEXT_CHARS = 4 << 20  # ten times the longest context
MAX_DETAIL_CHARS = 500  # longest error text: a template may raise a text as long as its memory
_WATCH_S = 0.02
_TOO_LARGE = "it exceeded its memory limit"


class _Generation(Extension):
    """``{% generation %}`` marks the model's own text, for training. Rendering ignores it."""

    tags = {"generation"}  # noqa: RUF012 - declared so in the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_OF_LISTS = frozenset(("append", "extend", "insert", "pop", "remove", "reverse"))


class _Environment(ImmutableSandboxedEnvironment):
    """Rejects unsafe access at once; the base class returns an empty value that fails only when used.

    Templates may change lists (Kimi K2's does): each rendering has variables of its own.
    """

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template may use an attribute."""
        return (type(obj) is list and attr in _OF_LISTS) or super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise SecurityError(f"access to attribute '{attribute}' of '{type(obj).__name__}' is unsafe")


def make_environment() -> ImmutableSandboxedEnvironment:
    """Return the environment that chat templates expect, without a loader."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    untyped = cast("Any", environment)  # jinja2 leaves the values' types open
    untyped.filters["tojson"] = _tojson
    untyped.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Format JSON without escaping HTML, unlike jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


class Compiled(Protocol):
    """A template that can be rendered."""

    def render(self, **variables: Any) -> str:
        """Return the text. Raises any exception."""
        ...


def render(compiled: Compiled, variables: dict[str, Any]) -> dict[str, str]:
    """Render one request. Every failure except the kernel's kill becomes an answer."""
    try:
        text = compiled.render(**variables)
    except MemoryError:
        return {"error": "memory", "detail": _TOO_LARGE}
    except SecurityError as exc:
        return {"error": "security", "detail": _detail(exc)}
    except Exception as exc:  # templates call methods of strings and lists, which may raise any exception
        name, detail = type(exc).__name__, _detail(exc)
        return {"error": "template", "detail": f"{name}: {detail}" if detail else name}
    if len(text) > MAX_TEXT_CHARS:
        return {
            "error": "memory",
            "detail": f"its text has {len(text)} characters, at most {MAX_TEXT_CHARS} are allowed",
        }
    return {"text": text}


def _detail(error: Exception) -> str:
    return str(error)[:MAX_DETAIL_CHARS]


def _make_watch() -> Any:
    unit = 1 if sys.platform == "darwin" else 1024
    limit = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit + MEMORY_BYTES

    def watch(_signal: int, _frame: object) -> None:
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit > limit:
            os._exit(3)

    return watch


def _answer(request: dict[str, Any], compile_template: Callable[[str], Compiled]) -> dict[str, str]:
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    if signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:
        signal.setitimer(signal.ITIMER_REAL, _WATCH_S, _WATCH_S)
    try:
        return render(compile_template(request["template"]), request["variables"])
    except MemoryError:  # compiling folds constants
        return {"error": "memory", "detail": _TOO_LARGE}
    except (TemplateError, RecursionError, ValueError) as exc:
        return {"error": "syntax", "detail": _detail(exc) or type(exc).__name__}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def serve(compile_template: Callable[[str], Compiled]) -> None:
    """Serve requests until stdin ends. The first template is compiled and rendered before the limits are taken."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    compile_template = lru_cache(maxsize=8)(compile_template)
    compile_template("{{ 1 }}").render(messages=[])  # lazy imports should be mapped before the limit is taken
    if not limit_memory(MEMORY_BYTES):
        signal.signal(signal.SIGALRM, _make_watch())

    def answer(frame: bytes) -> bytes:
        reply = _answer(json.loads(frame), compile_template)
        return json.dumps(reply, ensure_ascii=False).encode(errors="replace")

    answer_frames(answer)


if __name__ == "__main__":
    serve(make_environment().from_string)
