"""Keywords that a served model's chat template gets where a request does not say (PURE)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from edgepipe.errors import ConfigInvalid
from edgepipe.text.template import KNOWN_KEYWORDS

GIVEN_KEYWORDS = KNOWN_KEYWORDS - {"tools", "documents"}
"""Keywords that users give; requests have a field for ``tools``."""

_MAX_CHARS = 4096  # longest JSON: every state of the engine carries it
_EXAMPLE = """give a JSON object such as --template-keywords '{"enable_thinking": false}'"""


def checked_keywords(text: str) -> str:
    """Return the flag's JSON in its shortest form, empty for none. Raises ConfigInvalid."""
    if not text:
        return ""
    try:
        value: object = json.loads(text)
        short = json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (ValueError, RecursionError) as exc:
        raise _wrong(f"this is no JSON: {str(exc)[:100]}") from exc
    if not isinstance(value, dict):
        raise _wrong(f"this is no JSON object: {text[:40]}")
    if unknown := sorted(cast("dict[str, object]", value).keys() - GIVEN_KEYWORDS):
        raise _wrong(f"'{unknown[0][:40]}' is no keyword; known: {', '.join(sorted(GIVEN_KEYWORDS))}")
    if len(short) > _MAX_CHARS:
        raise _wrong(f"it has {len(short)} characters, at most {_MAX_CHARS} are kept")
    return short if value else ""


def keywords_in(text: str) -> Mapping[str, Any]:
    """Return the keywords that another node reports; none where it reports anything else."""
    try:
        value: object = json.loads(text) if text and len(text) <= _MAX_CHARS else {}
    except (ValueError, RecursionError):
        value = {}
    known = cast("dict[str, Any]", value) if isinstance(value, dict) else dict[str, Any]()
    return {name: known[name] for name in known if name in GIVEN_KEYWORDS}


def _wrong(fact: str) -> ConfigInvalid:
    return ConfigInvalid("--template-keywords cannot be used", fact=fact, next_step=_EXAMPLE)
