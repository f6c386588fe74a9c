"""One row per model, whether it is here, elsewhere, or in two folders of one disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from edgepipe.cli.views.copies_view import Key, copies_of

if TYPE_CHECKING:
    from edgepipe.model.store import StoredModel
    from edgepipe.wire.v1 import node_pb2 as pb


def model_rows(stored: Sequence[StoredModel], members: Sequence[pb.MemberState]) -> list[dict[str, Any]]:
    """Of this machine's models and those that the cluster's ``members`` tell of, ordered by name.

    A content of its own is a model of its own: two by one name are told apart by the beginning of their hash.
    """
    here: dict[Key, list[StoredModel]] = {}
    for one in stored:
        here.setdefault((one.id, one.manifest_hash), []).append(one)
    there: dict[Key, list[tuple[pb.MemberState, pb.ModelOnDisk]]] = {}
    for member in members:
        for told in member.node.models:
            there.setdefault((told.model, told.manifest_hash), []).append((member, told))
    copies = copies_of(members)
    keys = sorted({*here, *there})
    twins = {name for name, _ in keys if sum(other == name for other, _ in keys) > 1}
    rows: list[dict[str, Any]] = []
    for name, content in keys:
        row = _row(here.get((name, content), []), there.get((name, content), []))
        found = copies.get((name, content))
        rows.append(
            {
                "model": name,
                "content": content,
                **row,
                "copies": found and {"fewest": found.fewest, "nodes": list(found.nodes)},
                "ambiguous": name in twins,
            }
        )
    return rows


def _row(here: Sequence[StoredModel], there: Sequence[tuple[pb.MemberState, pb.ModelOnDisk]]) -> dict[str, Any]:
    config = here[0].config if here else None
    whole = next((one for one in here if one.whole), None)
    shown = whole or (here[0] if here else None)
    sizes = [sum(one.size_bytes for one in here)] if here else [told.num_bytes for _, told in there]
    return {
        "size_bytes": max(sizes),
        "layers": config.num_layers if config is not None else 0,
        "context": config.context_length if config is not None else 0,
        "architecture": config.architecture if config is not None else "",
        "whole": whole is not None,
        "path": str(shown.path) if shown is not None else "",
        "nodes": _nodes(there),
    }


def _nodes(there: Sequence[tuple[pb.MemberState, pb.ModelOnDisk]]) -> list[dict[str, Any]]:
    """Each node once, whole where any of its folders is."""
    whole: dict[str, bool] = {}
    for member, told in sorted(there, key=lambda one: (not one[0].self, one[0].node.name)):
        whole[member.node.name] = whole.get(member.node.name, False) or told.complete
    return [{"node": name, "whole": complete} for name, complete in whole.items()]
