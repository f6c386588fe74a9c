"""A stage process opens its weights for the served context, and reports its settings to its daemon."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edgepipe.backend.types import StageSettings
from edgepipe.ids import EngineId, Epoch, NodeId, PipelineId
from edgepipe.spec.facts import LayerRange, ModelConfig, Slice
from edgepipe.spec.longrope import served_config
from edgepipe.system import SystemClock
from edgepipe.weights.weights import Weights, open_weights
from edgepipe.wire.children import LoadShard, ShardLoaded
from edgepipe.wire.engines import StagePlacement
from edgepipe.workers.stage import _load  # pyright: ignore[reportPrivateUsage]
from tests.support.models.family_files import write_family_folder

WHOLE = Slice(index=0, layers=LayerRange(0, 2), embedding=True, head=True)


class Opening:
    """A stage that opens weights and loads none; the link to its daemon."""

    def __init__(self) -> None:
        self.config: ModelConfig | None = None
        self.reports: list[Any] = []

    async def load(self, *, open_weights: Callable[[], Weights], **_others: Any) -> Any:
        self.config = open_weights().config
        return SimpleNamespace(weight_bytes=1, kv_block_bytes=1, window_block_bytes=(), products=(), slow_paths=())

    def report(self, report: Any) -> None:
        self.reports.append(report)


@pytest.mark.parametrize("context", [64, 65, 0])
async def test_weights_are_opened_for_the_served_context(tmp_path: Path, context: int) -> None:
    folder = write_family_folder(tmp_path, "phi3")
    opening = Opening()
    load = LoadShard(
        pipeline_id=PipelineId("p"),
        epoch=Epoch(1, EngineId("e")),
        path=str(folder),
        placement=StagePlacement(node_id=NodeId("a"), slices=(WHOLE,)),
        settings=StageSettings(context_length=context),
    )
    await _load(cast("Any", opening), cast("Any", opening), load, cast("Any", None), SystemClock())
    assert opening.config == served_config(open_weights(folder).config, context)
    assert opening.config != served_config(open_weights(folder).config, 64 if context != 64 else 65)
    assert isinstance(opening.reports[-1], ShardLoaded)
    assert opening.reports[-1].settings == load.settings
