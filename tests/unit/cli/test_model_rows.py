"""What ``edgepipe models list`` makes of this machine's folders and of what other nodes tell."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edgepipe.backend.types import DeviceProfile
from edgepipe.cli.views.model_rows import model_rows
from edgepipe.ids import NodeId
from edgepipe.shapes.loader import named_shape
from edgepipe.weights.mixes import mix_table
from edgepipe.wire.nodes import DeviceState, MemberState, ModelOnDisk, NodeState


def stored(model: str, content: str, *, whole: bool, size: int, problem: str = "") -> Any:
    config = SimpleNamespace(num_layers=30, context_length=2048, architecture="llama")
    path = Path(f"/m/{model}{size}")
    return SimpleNamespace(
        id=model, manifest_hash=content, whole=whole, size_bytes=size, path=path, config=config, problem=problem
    )


def member(name: str, *models: tuple[str, str, bool], own: bool = False) -> MemberState:
    on_disk = [
        ModelOnDisk(model=model, manifest_hash=content, num_bytes=9, complete=complete)
        for model, content, complete in models
    ]
    return MemberState(self=own, node=NodeState(node_id=NodeId(name), name=name, models=tuple(on_disk)))


def test_two_folders_of_one_content_and_other_machines_make_one_row() -> None:
    here = [stored("demo", "c1", whole=False, size=5), stored("demo", "c1", whole=True, size=80)]
    members = [
        member("studio", ("demo", "c1", False)),
        member("gamer", ("demo", "c1", True), ("demo", "c1", False), own=True),
    ]
    (row,) = model_rows(cast("Any", here), members)
    assert (row["model"], row["whole"], row["size_bytes"], row["path"]) == ("demo", True, 85, "/m/demo80")
    assert row["nodes"] == [{"node": "gamer", "whole": True}, {"node": "studio", "whole": False}]
    assert not row["ambiguous"]


def test_what_is_elsewhere_only_is_listed_and_two_contents_are_two_models() -> None:
    here = [stored("demo", "c1", whole=True, size=80)]
    rows = model_rows(cast("Any", here), [member("studio", ("demo", "c2", True), ("big", "c3", True))])
    assert [(row["model"], row["content"], row["ambiguous"]) for row in rows] == [
        ("big", "c3", False),
        ("demo", "c1", True),
        ("demo", "c2", True),
    ]
    assert (rows[0]["size_bytes"], rows[0]["path"], rows[0]["layers"]) == (9, "", 0)


@pytest.mark.parametrize(
    ("mix", "packing", "where"), [("q4_k_m", "mlx", "studio"), ("q4_k_m", "", "no"), ("bf16", "mlx", "no")]
)
def test_a_model_fits_by_the_way_its_weights_are_kept(mix: str, packing: str, where: str) -> None:
    config = named_shape("qwen3-8b")
    here = SimpleNamespace(
        problem="",
        id="m",
        manifest_hash="c",
        whole=True,
        size_bytes=1,
        path=Path(),
        config=config,
        weight_table=mix_table(config, mix),
    )
    profile = DeviceProfile(
        backend="mlx",
        device="gpu",
        name="M1",
        compute_dtype="bfloat16",
        memory_total_bytes=16 * 10**9,
        memory_free_bytes=12 * 10**9,
        bandwidth_bytes_per_s=6e10,
        flops=2e12,
        packing=packing,
    )
    node = NodeState(
        node_id=NodeId("n"),
        name="studio",
        devices=(DeviceState(profile=profile, state="idle", free_bytes=12 * 10**9),),
        models=(ModelOnDisk(model="m", manifest_hash="c", num_bytes=1, complete=True),),
    )
    (row,) = model_rows(cast("Any", [here]), [MemberState(self=True, node=node, state="alive")])
    assert row["fits"] == where


def test_a_model_that_cannot_be_read_has_a_row_and_hides_no_other() -> None:
    here = [
        stored("demo", "c1", whole=True, size=5),
        stored("torn", "c2", whole=True, size=7, problem="it has 0 layers"),
    ]
    rows = model_rows(cast("Any", here), [])
    assert [(row["model"], row["problem"], row["size_bytes"]) for row in rows] == [
        ("demo", "", 5),
        ("torn", "it has 0 layers", 7),
    ]


def test_without_a_node_the_disk_alone_counts() -> None:
    (row,) = model_rows(cast("Any", [stored("demo", "c1", whole=False, size=5)]), [])
    assert (row["nodes"], row["copies"], row["whole"]) == ([], None, False)
