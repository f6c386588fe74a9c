"""Chat templates: read a model's templates and render them in a child process that may be killed."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from edgepipe.children.warm_child import ChildEnded, WarmChild
from edgepipe.errors import ModelInvalid, TemplateFailed
from edgepipe.files.strict_json import read_json_object
from edgepipe.plain_words import plain

MAX_TEMPLATE_BYTES = 1 << 20  # the longest in use has about 20 KB
_MAX_ANSWER_BYTES = 25 << 20  # the child's 4 M characters, which JSON writes in at most six bytes each
_MAX_WAITING = 512  # conversations of one user: each is short, and each connection has one
KNOWN_KEYWORDS = frozenset(
    {
        "tools",
        "documents",
        "enable_thinking",
        "thinking",
        "thinking_budget",
        "reasoning_effort",
        "low_effort",
        "keep_past_thinking",
        "preserve_thinking",
        "clear_thinking",
        "builtin_tools",
        "date_string",
        "tools_in_user_message",
        "custom_tools",
        "xml_tools",
        "python_tools",
        "continue_final_message",
        "model_identity",
    }
)
"""Keywords that a request may pass to a template besides its messages."""

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A model's templates by name, and the special tokens that they may use."""

    sources: Mapping[str, str]  # "default", perhaps "tool_use", ...
    special_tokens: Mapping[str, str] = field(default_factory=dict[str, str])

    def choose(self, *, tools: bool) -> str:
        """Return the source to render. Raises TemplateFailed if the model has none."""
        names = ("tool_use", "default") if tools else ("default",)
        found = next((self.sources[name] for name in names if name in self.sources), None)
        if found is None:
            raise TemplateFailed(
                "the model has no chat template",
                fact=f"templates: {', '.join(self.sources) or 'none'}",
                next_step="send a plain prompt to /v1/completions, or choose an instruct model",
            )
        return found.removeprefix("\ufeff")  # a byte order mark is no part of a prompt


def hf_template(folder: Path) -> ChatTemplate:
    """Read a folder's template: from ``chat_template.jinja``, else ``tokenizer_config.json``, else that of a processor.

    Raises ModelInvalid.
    """
    path = folder / "tokenizer_config.json"
    config = read_json_object(path, max_bytes=32 << 20) if path.is_file() else {}
    sources = _named(config.get("chat_template"))
    file, processor = folder / "chat_template.jinja", folder / "chat_template.json"
    if "default" not in sources and processor.is_file():  # models with pictures have one: Mistral Small 3.1
        sources |= _named(read_json_object(processor).get("chat_template"))
    if file.is_file():
        sources["default"] = _read_source(file)
    _check_sources(sources)
    special = {name: _token_text(config.get(name)) for name in _SPECIAL}
    return ChatTemplate(sources=sources, special_tokens={name: text for name, text in special.items() if text})


def gguf_template(metadata: Mapping[str, object], special_tokens: Mapping[str, str]) -> ChatTemplate:
    """Return the templates in GGUF metadata. Raises ModelInvalid."""
    prefix = "tokenizer.chat_template"
    sources = {
        "default" if key == prefix else key.removeprefix(f"{prefix}."): value
        for key, value in metadata.items()
        if (key == prefix or key.startswith(f"{prefix}.")) and isinstance(value, str)
    }
    _check_sources(sources)
    return ChatTemplate(sources=sources, special_tokens=dict(special_tokens))


def _check_sources(sources: Mapping[str, str]) -> None:
    for name, source in sources.items():
        if len(source) > MAX_TEMPLATE_BYTES:
            raise ModelInvalid(f"the chat template '{name[:40]}' is too long", fact=f"{len(source)} characters")


def _named(value: object) -> dict[str, str]:
    """Return templates by name from a string or a list of ``{"name", "template"}``."""
    if isinstance(value, str):
        return {"default": value}
    entries = cast("list[object]", value) if isinstance(value, list) else []
    objects = [cast("dict[str, object]", entry) for entry in entries if isinstance(entry, dict)]
    return {str(entry.get("name")): str(entry.get("template")) for entry in objects if entry.get("template")}


def _read_source(file: Path) -> str:
    if file.stat().st_size > MAX_TEMPLATE_BYTES:
        raise ModelInvalid(f"'{file.name}' is too large", fact=f"{file.stat().st_size} bytes")
    return file.read_text(encoding="utf-8", errors="replace")


def _token_text(value: object) -> str:
    if isinstance(value, dict):
        value = cast("dict[str, object]", value).get("content")
    return value if isinstance(value, str) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateTimeouts:
    """Deadlines of the parent. The kernel kills the child after 1 s of CPU time."""

    start_s: float = 20.0  # start of an interpreter on an overloaded machine
    render_s: float = 6.0  # wall time; reached only if the child gets no CPU


class TemplateRenderer:
    """Renders one model's template in a warm child, which is replaced after it exceeds a limit."""

    def __init__(
        self,
        template: ChatTemplate,
        timeouts: TemplateTimeouts | None = None,
        *,
        module: str = "edgepipe.text.template_child",
    ) -> None:
        """``module``: the child's, which may render with another library."""
        self._template = template
        self._timeouts = timeouts or TemplateTimeouts()
        self._child = WarmChild(module, start_s=self._timeouts.start_s, max_waiting=_MAX_WAITING)

    @property
    def template(self) -> ChatTemplate:
        """The rendered template."""
        return self._template

    async def start(self) -> None:
        """Start the child now, so that the first chat does not wait for it. Raises TemplateFailed."""
        try:
            await self._child.start()
        except ChildEnded as exc:
            raise _failed(*_death(exc)) from exc

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        owner: str = "",
        add_generation_prompt: bool = True,
        **keywords: Any,
    ) -> str:
        """Render the prompt of a conversation, in the owner's turn.

        Raises TemplateFailed: no template, refused, failed, or over a limit. Raises QueueFull.
        """
        unknown = sorted(set(keywords) - KNOWN_KEYWORDS)
        if unknown:
            raise TemplateFailed(
                f"chat templates have no keyword '{unknown[0]}'", fact=f"known: {sorted(KNOWN_KEYWORDS)}"
            )
        source = self._template.choose(tools=bool(keywords.get("tools")))
        variables = {**self._template.special_tokens, "tools": None, "documents": None, **keywords}
        variables |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        answer = await self._exchange({"template": source, "variables": variables}, owner)
        if "text" in answer:
            return answer["text"]
        raise _failed(str(answer.get("detail", "")), str(answer.get("error", "")))

    async def close(self) -> None:
        """End the child: later calls raise TemplateFailed."""
        await self._child.close()

    async def __aenter__(self) -> TemplateRenderer:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _exchange(self, request: dict[str, Any], owner: str) -> dict[str, Any]:
        """Send one request to the child and return its answer."""
        frame = _frame(request)
        try:
            data = await self._child.ask(
                frame, owner=owner, within_s=self._timeouts.render_s, most_bytes=_MAX_ANSWER_BYTES
            )
            answer = cast("dict[str, Any]", json.loads(data))
        except TimeoutError as exc:
            raise _failed(f"it did not answer within {self._timeouts.render_s:g} s", "time") from exc
        except ChildEnded as exc:
            raise _failed(*_death(exc)) from exc
        if answer.get("error") == "memory":
            await self._child.end()
        return answer


def _frame(request: dict[str, Any]) -> bytes:
    """Encode a request. A model's calls may have halves of surrogate pairs; they become JSON's escapes."""
    try:
        return json.dumps(request, ensure_ascii=False).encode(errors="backslashreplace")
    except (TypeError, ValueError, RecursionError) as exc:
        raise TemplateFailed("the messages cannot be passed to the chat template", fact=plain(exc)) from exc


def _death(end: ChildEnded) -> tuple[str, str]:
    if not end.started:
        return f"its process did not start (exit code {end.code})", "start"
    if end.code == -signal.SIGPROF:
        return "it used its 1 s of CPU time", "time"
    return "it exceeded its memory limit or crashed", "memory"


def _failed(detail: str, kind: str) -> TemplateFailed:
    steps = {
        "template": "check the order and roles of the messages",
        "security": "do not use this model's template: send a plain prompt to /v1/completions",
    }
    default = "choose another model, or send a plain prompt to /v1/completions"
    failed = TemplateFailed(fact=detail, next_step=steps.get(kind, default))
    failed.refused = kind in steps
    return failed
