"""A child process as ``template_child`` that renders with transformers.

Its command: ``python -m edgepipe.text.template_reference``.
``edgepipe models check`` compares with it where transformers is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgepipe.text.template_child import serve


@dataclass(frozen=True, slots=True)
class _Source:
    """A template as transformers renders it."""

    text: str
    library: Any

    def render(
        self,
        *,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Any = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        texts, _ = self.library.render_jinja_template(
            [messages],
            tools=tools,
            documents=documents,
            chat_template=self.text,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
        return texts[0]


def is_installed() -> bool:
    """Return whether transformers is installed."""
    return importlib.util.find_spec("transformers") is not None


def main() -> None:
    """Serve requests until stdin ends."""
    library = importlib.import_module("transformers.utils.chat_template_utils")  # only this process needs the package
    serve(lambda text: _Source(text, library))


if __name__ == "__main__":
    main()
