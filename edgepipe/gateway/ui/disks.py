"""Models on the cluster's disks as the page draws them (PURE)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgepipe.cluster.model_copies import copies_of
from edgepipe.safe_text import one_line
from edgepipe.wire.nodes import MemberState

_MOST_MODELS = 512
_MOST_HOLDERS = 64
_NAME_CHARS = 128


def disks_json(members: Sequence[MemberState]) -> list[dict[str, Any]]:
    """Return each model on a disk by name: its size, the number of copies, and which machines hold how much of it."""
    copies = copies_of(members)
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for member in members:
        for model in member.node.models:
            key = (model.model, model.manifest_hash)
            if key not in rows and len(rows) >= _MOST_MODELS:
                continue
            row = rows.setdefault(
                key,
                {
                    "name": one_line(model.model, most_chars=_NAME_CHARS),
                    "content": one_line(model.manifest_hash[:8]),
                    "size_bytes": 0,
                    "copies": copies[key].fewest,
                    "holders": [],
                },
            )
            row["size_bytes"] = max(row["size_bytes"], model.num_bytes)
            if len(row["holders"]) < _MOST_HOLDERS:
                name = one_line(member.node.name, most_chars=_NAME_CHARS)
                holder = {"name": name, "whole": model.complete, "bytes": model.num_bytes, "self": member.self}
                row["holders"].append(holder)
    return [rows[key] for key in sorted(rows)]
