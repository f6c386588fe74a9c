"""One row per model on any disk of the cluster, also if it is in two folders of one disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from edgepipe.cluster.model_copies import Key, copies_of
from edgepipe.errors import ModelInvalid

if TYPE_CHECKING:
    from edgepipe.store.store import StoredModel
    from edgepipe.store.unfinished import UnendedPull
    from edgepipe.wire.nodes import MemberState, ModelOnDisk


def model_rows(
    stored: Sequence[StoredModel], members: Sequence[MemberState], begun: Sequence[UnendedPull] = ()
) -> list[dict[str, Any]]:
    """Return rows of this machine's models and of models that ``members`` report, ordered by name.

    Models with the same name but different content get a row each; the first characters of their hashes differ.
    Models that cannot be used and pulls that have not ended (``begun``) come last.
    """
    own: dict[Key, list[StoredModel]] = {}
    damaged: list[dict[str, Any]] = []
    for model in stored:
        if problem := model.problem:
            damaged.append(_lone_row(model.id, size_bytes=model.size_bytes, path=str(model.path), problem=problem))
        else:
            own.setdefault((model.id, model.manifest_hash), []).append(model)
    reported: dict[Key, list[tuple[MemberState, ModelOnDisk]]] = {}
    for member in members:
        for model in member.node.models:
            reported.setdefault((model.model, model.manifest_hash), []).append((member, model))
    copies = copies_of(members)
    keys = sorted({*own, *reported})
    twins = {name for name, _ in keys if sum(other == name for other, _ in keys) > 1}
    rows: list[dict[str, Any]] = []
    for name, content in keys:
        row = _row(own.get((name, content), []), reported.get((name, content), []))
        found = copies.get((name, content))
        rows.append(
            {
                "model": name,
                "content": content,
                **row,
                "fits": _fits(own.get((name, content), []), members),
                "copies": found and {"fewest": found.fewest, "nodes": list(found.nodes)},
                "ambiguous": name in twins,
                "pull": "",
                "problem": "",
            }
        )
    return rows + damaged + [_begun_row(pull) for pull in begun]


def _begun_row(pull: UnendedPull) -> dict[str, Any]:
    state = "goes on" if pull.goes_on else "interrupted"
    return _lone_row(pull.id, size_bytes=pull.num_bytes, path=str(pull.path), pull=state)


def _lone_row(model_id: str, **about: Any) -> dict[str, Any]:
    """Return the row of something that no node can use: ``about`` says what is known of it."""
    unknown = {"fits": None, "copies": None, "ambiguous": False, "pull": "", "problem": ""}
    return {"model": model_id, "content": "", **_row((), ()), **unknown, **about}


def _row(stored: Sequence[StoredModel], reported: Sequence[tuple[MemberState, ModelOnDisk]]) -> dict[str, Any]:
    config = stored[0].config if stored else None
    whole = next((model for model in stored if model.whole), None)
    shown = whole or (stored[0] if stored else None)
    sizes = [sum(model.size_bytes for model in stored)] if stored else [model.num_bytes for _, model in reported]
    return {
        "size_bytes": max(sizes, default=0),
        "layers": config.num_layers if config is not None else 0,
        "context": config.context_length if config is not None else 0,
        "architecture": config.architecture if config is not None else "",
        "whole": whole is not None,
        "path": str(shown.path) if shown is not None else "",
        "nodes": _nodes(reported),
    }


def _fits(stored: Sequence[StoredModel], members: Sequence[MemberState]) -> str | None:
    """Return where the model would go; None without a device or the model's description."""
    if not stored or not any(member.node.devices for member in members):
        return None
    from edgepipe.cli.views.fitting import plan_on, where_text

    try:
        found = plan_on(members, stored[0].config, stored[0].weight_table)
    except ModelInvalid:
        return None
    return where_text(found)


def _nodes(reported: Sequence[tuple[MemberState, ModelOnDisk]]) -> list[dict[str, Any]]:
    """List each node once; its model is whole if any of its folders has all of it."""
    whole: dict[str, bool] = {}
    for member, model in sorted(reported, key=lambda entry: (not entry[0].self, entry[0].node.name)):
        whole[member.node.name] = whole.get(member.node.name, False) or model.complete
    return [{"node": name, "whole": complete} for name, complete in whole.items()]
