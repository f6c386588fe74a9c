"""Which models may draft for a served one, and what happens where they cannot be had."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from edgepipe_emulated import emulated_model_config

from edgepipe.backend.types import StageSettings
from edgepipe.daemon.files.draft_files import DraftFiles
from edgepipe.daemon.files.models import LocalModel
from edgepipe.daemon.serving.draft_models import as_drafted, with_draft_model
from edgepipe.daemon.serving.replanning import Replanner
from edgepipe.errors import ConfigInvalid, ModelDownloadFailed, ModelInvalid, ModelUnknown, NoFeasiblePlacement
from edgepipe.ids import EngineId, Epoch, NodeId, PipelineId
from edgepipe.spec.facts import LayerRange, ModelConfig, Slice
from edgepipe.store.store import ModelStore
from edgepipe.weights.emulated_folder import write_model_folder
from edgepipe.wire.children import PrepareProgress, PrepareRequest
from edgepipe.wire.engines import ServeSpec, StagePlacement
from edgepipe.wire.serving import PlanMade, PlanWanted

CONFIG = emulated_model_config(num_layers=2)
PADDED = emulated_model_config(num_layers=1, vocab_size=CONFIG.vocab_size + 64)
RECURRENT = emulated_model_config(num_layers=2, attention_every=2)


class Known:
    """Stands for ``Models``: a store whose files are all here, and errors instead."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._store = ModelStore(folder / "models")
        self.error: Exception | None = None
        self.fetched: list[str] = []
        self.torn = False  # fetches end with an error

    def add(self, name: str, config: ModelConfig, *, swapped: bool = False) -> LocalModel:
        """Pull a model. ``swapped``: two tokens have one another's id."""
        source = self._folder / name
        write_model_folder(source, config)
        if swapped:
            values = json.loads((source / "tokenizer.json").read_text())
            vocabulary = values["model"]["vocab"]
            vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
            (source / "tokenizer.json").write_text(json.dumps(values))
        self._store.pull(str(source))
        return self._local(name)

    def _local(self, name: str) -> LocalModel:
        stored = self._store.resolve(name)
        return LocalModel(
            name=name, path=stored.path, manifest_hash=stored.manifest_hash, config=stored.config, stored=stored
        )

    async def resolve(self, name: str) -> LocalModel:
        if self.error is not None:
            raise self.error
        return self._local(name)

    async def adopt(self, name: str, **_: str) -> LocalModel:
        return await self.resolve(name)

    async def fetch(self, model: LocalModel, slices: Any, **_: str) -> AsyncGenerator[PrepareProgress]:
        self.fetched.append(f"{model.name}:{slices[0].layers}")
        yield PrepareProgress(phase="fetching")
        if self.torn:
            raise ModelDownloadFailed("the disk is full")


@pytest.fixture
def known(tmp_path: Path) -> Any:
    return Known(tmp_path)


async def test_a_model_with_the_same_tokens_drafts_and_is_counted(known: Any) -> None:
    model, draft = known.add("large", CONFIG), known.add("small", PADDED)
    drafted = await with_draft_model(known, "small", model)
    assert drafted.draft is not None
    assert drafted.draft.path == draft.path
    need = drafted.weights.draft
    assert need is not None
    assert (need.config, need.kv_tokens) == (draft.config, 2 * CONFIG.context_length)
    assert replace(drafted.weights, draft=None) == model.weights
    assert drafted.weights_json == model.weights_json
    spec = ServeSpec(model="large", settings=StageSettings(draft_model="small"))
    again = (await as_drafted(known, spec, model)).draft
    assert again is not None
    assert again.manifest_hash == draft.manifest_hash
    assert (await as_drafted(known, ServeSpec(model="large"), model)).draft is None


async def test_others_are_refused_and_sizes_named(known: Any) -> None:
    model = known.add("large", CONFIG)
    known.add("odd", PADDED, swapped=True)
    known.add("recurrent", RECURRENT)
    with pytest.raises(ConfigInvalid, match="odd cannot draft for large: its vocabulary is another one") as refused:
        await with_draft_model(known, "odd", model)
    sizes = rf"large has {CONFIG.vocab_size} tokens, odd has {PADDED.vocab_size}; token \d+ is '[ab]' in one and .*"
    assert re.fullmatch(sizes, refused.value.fact)
    with pytest.raises(ConfigInvalid, match="recurrent cannot be a draft model"):
        await with_draft_model(known, "recurrent", model)
    known.error = ModelUnknown("no model 'eagle' is in the cluster", fact="on its nodes: large", next_step="pull it")
    with pytest.raises(ConfigInvalid, match="--draft cannot be 'eagle'") as refused:
        await with_draft_model(known, "eagle", model)
    fact = "it is auto, lookup, mtp, off, or a model; no model 'eagle' is in the cluster (on its nodes: large)"
    assert (refused.value.fact, refused.value.next_step) == (fact, "pull it")
    known.error = ModelInvalid("its manifest is damaged", next_step="pull it again")
    with pytest.raises(ModelInvalid) as damaged:
        await with_draft_model(known, "small", model)
    assert damaged.value.next_step == "pull it again, or leave --draft out"
    spec = ServeSpec(model="large", settings=StageSettings(draft_model="small"))
    assert (await as_drafted(known, spec, model)).draft is None, "a running model goes on without it"


@pytest.mark.parametrize("drafted", [True, False])
async def test_a_lost_stage_is_replaced_without_the_draft_model_where_only_that_fits(
    monkeypatch: pytest.MonkeyPatch, drafted: bool
) -> None:
    settings = StageSettings(context_length=64, draft_model="small" if drafted else "", draft_hash="abc")
    planner = Replanner(peers=cast("Any", None), models=cast("Any", None), surveyor=cast("Any", None))
    tried: list[str] = []

    async def plan(_pipeline: str, wanted: PlanWanted, _shares: Any) -> PlanMade:
        tried.append(wanted.spec.settings.draft_model)
        if tried[-1] or not drafted:
            raise NoFeasiblePlacement("no room")
        return PlanMade(spec=wanted.spec)

    monkeypatch.setattr(planner, "_plan", plan)
    planning = planner.plan("p", PlanWanted(spec=ServeSpec(model="large", settings=settings)))
    if not drafted:
        with pytest.raises(NoFeasiblePlacement):
            await planning
        return
    spec = (await planning).spec
    assert spec is not None
    assert spec.settings == StageSettings(context_length=64)
    assert tried == ["small", ""]


def request(draft: str, *, head: bool) -> PrepareRequest:
    part = Slice(index=0, layers=LayerRange(0, 2), embedding=True, head=head)
    return PrepareRequest(
        pipeline_id=PipelineId("p"),
        epoch=Epoch(1, EngineId("e")),
        placement=StagePlacement(node_id=NodeId("a"), slices=(part,)),
        settings=StageSettings(draft_model=draft),
    )


async def test_the_stage_with_the_head_fetches_it_or_is_served_without(
    known: Any, caplog: pytest.LogCaptureFixture
) -> None:
    small = known.add("small", CONFIG)
    cases = [("small", True, str(small.path), ["small:0-1"]), ("small", False, "", []), ("", True, "", [])]
    for draft, head, path, fetched in cases:
        known.fetched.clear()
        files = DraftFiles(known, request(draft, head=head), wanted_by="")
        progress = [each async for each in files.fetch()]
        assert (files.path, files.model is not None) == (path, bool(path))
        assert (known.fetched, len(progress)) == (fetched, len(fetched))
    assert not caplog.messages
    known.torn = True
    files = DraftFiles(known, request("small", head=True), wanted_by="")
    assert len([each async for each in files.fetch()]) == 1
    assert (files.path, files.model) == ("", None)
    assert "the draft model small cannot be used: the disk is full" in caplog.messages[0]
