"""Learns the traits of foreign templates in a process: ``python -m edgepipe.text.conversations.learning_child``.

It reads ``{"plain", "with_tools", "special_tokens"}`` from standard input, two templates, and writes both traits as
JSON. A template may run or allocate without end, so the kernel limits the process as it limits ``template_child``. A
conversation that takes too long counts as refused; after three of them, or at a limit of the kernel, the process ends
without traits.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template
from jinja2.exceptions import TemplateError

from edgepipe.children.child_memory import limit_memory
from edgepipe.text.conversations.learning import Ask, Rendering, learn
from edgepipe.text.conversations.traits import TemplateTraits
from edgepipe.text.template_child import MEMORY_BYTES, make_environment, render

CPU_S = 5  # total time; the largest templates take 0.3 s
_RENDER_S = 0.5  # longest time for one conversation
_MOST_SLOW = 3
_DAY = datetime(2026, 1, 1)  # traits must not depend on the day when they are learned


class _Slow(BaseException):
    """A conversation took too long. No handler of errors in a template catches it."""


def _slow(_signal: int, _frame: object) -> NoReturn:
    raise _Slow


class Renderer:
    """Renders probes with a compiled template."""

    def __init__(
        self, template: Template, special_tokens: Mapping[str, str], *, now: Callable[[], datetime] = lambda: _DAY
    ) -> None:
        """``now``: the time that the template reads."""
        self._template = template
        self._now = now
        self._special_tokens = special_tokens
        self.num_slow = 0

    def render(self, ask: Ask) -> Rendering:
        """Return the outcome of one conversation. Raises _Slow after the third one that took too long."""
        variables: dict[str, Any] = {**self._special_tokens, "documents": None, "strftime_now": self._now().strftime}
        turns, tools = deepcopy((list(ask.turns), list(ask.tools)))  # a template may change its variables
        variables |= {"messages": turns, "tools": tools or None, "add_generation_prompt": True}
        answer = self._within_time(variables | dict(ask.keywords))
        if answer.get("error") == "memory":
            self.num_slow += 1
        if self.num_slow >= _MOST_SLOW:
            raise _Slow
        return Rendering(text=answer["text"]) if "text" in answer else Rendering(refused=answer["detail"] or "error")

    def _within_time(self, variables: dict[str, Any]) -> dict[str, str]:
        signal.setitimer(signal.ITIMER_PROF, _RENDER_S)
        try:
            return render(self._template, variables)
        except _Slow:
            self.num_slow += 1
            return {"error": "time", "detail": f"it took more than {_RENDER_S:g} s"}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)


def learned(renderer: Renderer, *, tools: bool) -> TemplateTraits:
    """Run ``learn`` with a renderer."""
    learning = learn(tools=tools)
    ask = next(learning)
    while True:
        try:
            ask = learning.send(renderer.render(ask))
        except StopIteration as done:
            return done.value


def main() -> None:
    """Learn the traits of the templates on standard input."""
    request = json.loads(sys.stdin.buffer.read())
    environment = make_environment()
    environment.from_string("{{ 1 }}").render()  # jinja2 imports lazily; all of it should be mapped before the limit
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    limit_memory(MEMORY_BYTES)
    signal.signal(signal.SIGPROF, _slow)
    try:
        traits = {
            name: learned(Renderer(environment.from_string(request[name]), request["special_tokens"]), tools=tools)
            for name, tools in (("plain", False), ("with_tools", True))
        }
    except (_Slow, MemoryError):
        sys.exit("it needs too much time or memory")
    except (TemplateError, RecursionError, ValueError) as exc:
        sys.exit(f"it is no template: {str(exc)[:200]}")
    sys.stdout.write(json.dumps({name: one.to_json() for name, one in traits.items()} | {"note": ""}))


if __name__ == "__main__":
    main()
