"""The traits of a stored model's templates: learned once, and kept beside its card.

They follow from the card, so they are no part of the model's content: its hash does not cover them, and nodes do not
exchange them. Traits of another version, or of other templates, are learned again.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

from edgepipe.errors import ModelInvalid
from edgepipe.files.canonical import value_digest
from edgepipe.files.disk import replace_file
from edgepipe.files.strict_json import read_json_object
from edgepipe.text.conversations.traits import CAREFUL, TRAITS_VERSION, ModelTraits
from edgepipe.text.template import ChatTemplate

TRAITS_FILE = "template_traits.json"
_MAX_BYTES = 64 << 10
_LEARN_S = 60  # wall time of a process that the kernel limits to 5 s of CPU time


def model_traits(folder: Path, template: ChatTemplate) -> ModelTraits:
    """Return the traits of a stored model; learn and keep them if the folder has none. Blocks for up to 1 s."""
    if "default" not in template.sources:
        return ModelTraits()
    digest = _digest(template)
    if (known := _read(folder, digest)) is not None:
        return known
    traits = learn_traits(template)
    value = {"version": TRAITS_VERSION, "template": digest, "traits": traits.to_json()}
    with contextlib.suppress(OSError):  # a disk may be read-only: then every load learns them
        replace_file(folder / TRAITS_FILE, json.dumps(value, indent=1).encode())
    return traits


def learn_traits(template: ChatTemplate) -> ModelTraits:
    """Learn the traits of templates in a child with limits. Templates that exceed them get careful traits.

    Raises TemplateFailed if there is no template.
    """
    request = {
        "plain": template.choose(tools=False),
        "with_tools": template.choose(tools=True),
        "special_tokens": dict(template.special_tokens),
    }
    command = (sys.executable, "-P", "-m", "edgepipe.text.conversations.learning_child")
    try:
        done = subprocess.run(
            command, input=json.dumps(request).encode(), capture_output=True, timeout=_LEARN_S, check=False
        )
    except subprocess.TimeoutExpired:
        return _careful(f"it was not read within {_LEARN_S} s")
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines() if done.returncode > 0 else []
        return _careful(lines[-1][:200] if lines else "it needs too much time or memory")
    return ModelTraits.from_json(json.loads(done.stdout))


def _careful(fact: str) -> ModelTraits:
    note = f"the chat template could not be examined: {fact}. Chats show the model tools and calls as plain text"
    return ModelTraits(plain=CAREFUL, with_tools=CAREFUL, note=note)


def _read(folder: Path, digest: str) -> ModelTraits | None:
    """Return the kept traits, or None if they are missing, damaged, or of another version or template."""
    try:
        value = read_json_object(folder / TRAITS_FILE, max_bytes=_MAX_BYTES)
        if (value.get("version"), value.get("template")) != (TRAITS_VERSION, digest):
            return None
        traits = value.get("traits")
        return ModelTraits.from_json(cast("dict[str, Any]", traits)) if isinstance(traits, dict) else None
    except (ModelInvalid, ValueError, TypeError, KeyError):
        return None


def _digest(template: ChatTemplate) -> str:
    return value_digest({"sources": dict(template.sources), "special_tokens": dict(template.special_tokens)})
