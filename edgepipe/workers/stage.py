"""A stage process: imports its backend, measures the device, then waits as a spare for the command to load."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

from edgepipe.backend.loader import create_backend
from edgepipe.backend.protocol import Backend
from edgepipe.backend.types import DEFAULT_SETTINGS, BackendOptions, DeviceProfile, LoadProgress, StageSettings
from edgepipe.clock import Clock
from edgepipe.errors import EdgepipeError
from edgepipe.files.strict_json import parse_json_object
from edgepipe.link.channels import make_server
from edgepipe.link.shaped import make_network
from edgepipe.planner.layer_profile import LayerProfile
from edgepipe.sampling.bounds import ModelBounds
from edgepipe.spec.config_json import config_from_json
from edgepipe.spec.expert_places import SETTING, as_setting
from edgepipe.stage.compute import ComputeThread
from edgepipe.stage.draft_child import DraftLaunch
from edgepipe.stage.probe import probe_layer
from edgepipe.stage.stage import Stage
from edgepipe.stage.step_mark import StepMark
from edgepipe.store.linked_files import check_unchanged
from edgepipe.store.store import StoredModel
from edgepipe.system import SystemClock
from edgepipe.text.tokenizer import Tokenizer
from edgepipe.weights.weight_table import table_from_json
from edgepipe.weights.weights import Weights, open_weights
from edgepipe.wire.children import (
    ChildProgress,
    LoadShard,
    PauseStage,
    PrepareProgress,
    ProfileLayerRequest,
    ShardLoaded,
)
from edgepipe.wire.common import Hello
from edgepipe.workers.daemon_link import DaemonLink
from edgepipe.workers.grpc_server import bind_one_of
from edgepipe.workers.progress import report_progress
from edgepipe.workers.settings import ChildSettings

logger = logging.getLogger(__name__)

_IMPORT_S = 60.0  # a spare that creates its backend again may hold the interpreter for long
_LOADING_INTERVAL_S = 0.1  # one report per tensor would be hundreds per second


async def run(settings: ChildSettings, link: DaemonLink) -> None:
    """Serve one stage until cancelled. Raises BackendUnavailable and the errors of loading."""
    clock = SystemClock()
    network = make_network(settings.link, clock)
    mark = StepMark(settings.mark) if settings.mark >= 0 else None
    compute = ComputeThread(clock=clock, mark=mark)
    server = make_server(link.security, keepalive=settings.keepalive)
    options = _options(settings, DEFAULT_SETTINGS)
    backend = await compute.call(lambda: create_backend(settings.backend, options))
    profile = settings.device_profile or await compute.call(backend.profile)
    port = bind_one_of(server, link.security, settings)
    link.started(port=port, profile=profile)
    stage: Stage | None = None
    reporter = asyncio.create_task(report_progress(link, lambda: _progress(stage)), name="progress")
    try:
        async for command in link.commands():
            if isinstance(command, PauseStage) and stage is not None:
                if command.paused:
                    stage.pause()
                elif command.epoch is not None:
                    stage.resume(command.epoch)
            if isinstance(command, ProfileLayerRequest) and stage is None:
                await _profile(compute, backend, link, settings, command, profile, clock)
            if not isinstance(command, LoadShard) or stage is not None:
                continue
            if (wanted := _options(settings, command.settings, command.placement.ram_percent)) != options:
                await compute.call(backend.close)
                backend = await compute.call(partial(create_backend, settings.backend, wanted))
            hello = Hello(
                role="stage",
                node_id=settings.node_id,
                node_name=settings.node_name,
                cluster_id=settings.cluster_id,
            )
            stage = Stage(
                backend=backend,
                clock=clock,
                hello=hello,
                security=link.security,
                compute=compute,
                network=network,
                open_tokenizer=partial(_read_tokenizer, Path(command.path)),
                disk_folder=Path(settings.tier_dir) if settings.tier_dir else None,
                name=f"stage on {profile.name}",
            )
            stage.add_to(server)
            await server.start()
            draft = partial(_draft_launch, settings, command, wanted) if command.draft_path else None
            await _load(stage, link, command, profile, clock, draft)
    finally:
        reporter.cancel()
        await server.stop(grace=0.2)
        if stage is not None:
            await stage.close()
        if network is not None:
            network.close()


async def _profile(
    compute: ComputeThread,
    backend: Backend,
    link: DaemonLink,
    settings: ChildSettings,
    wanted: ProfileLayerRequest,
    device: DeviceProfile,
    clock: Clock,
) -> None:
    """Time a layer of a shape; report no times for a shape that this device cannot hold."""
    size = 4 if device.compute_dtype == "float32" else 2
    try:
        config = config_from_json(parse_json_object(wanted.model_config.encode(), what="the model's shape"))
        weights = table_from_json(wanted.model_weights, config)
        if (options := _options(settings, wanted.settings)) != _options(settings, DEFAULT_SETTINGS):
            backend = await compute.call(partial(create_backend, settings.backend, options))
        found = await compute.call(
            partial(probe_layer, backend, config, clock, value_bytes=size, weights=weights, packing=device.packing)
        )
    except EdgepipeError as error:
        logger.warning("a probe layer cannot run: %s", error)
        found = LayerProfile(base_s=0.0, decode=(), prefill=(), head=(), kv_token_s=0.0, decode_context=0)
    link.report(found)


async def _load(
    stage: Stage,
    link: DaemonLink,
    load: LoadShard,
    profile: DeviceProfile,
    clock: Clock,
    draft: Callable[[ModelBounds], DraftLaunch] | None = None,
) -> None:
    sent_at_s = float("-inf")

    def tell(done: LoadProgress) -> None:
        nonlocal sent_at_s
        if clock.monotonic_s() - sent_at_s >= _LOADING_INTERVAL_S:
            sent_at_s = clock.monotonic_s()
            link.report(PrepareProgress(phase="loading", bytes_done=done.bytes_done, bytes_total=done.bytes_total))

    path, loop = Path(load.path), asyncio.get_running_loop()

    def compared(done: int, total: int) -> None:
        counts = LoadProgress(bytes_done=done, bytes_total=total)
        loop.call_soon_threadsafe(tell, counts)

    def open_unchanged() -> Weights:
        check_unchanged(path, compared)
        opened = open_weights(path).in_context(load.settings.context_length)
        return opened.holding(load.placement.slices)

    shard = await stage.load(
        slices=load.placement.slices,
        open_weights=open_unchanged,
        progress=tell,
        settings=load.settings,
        draft=draft,
    )
    await asyncio.to_thread(check_unchanged, path, compared)  # the file must not have changed while it was read
    link.report(
        ShardLoaded(
            weight_bytes=shard.weight_bytes,
            kv_block_bytes=shard.kv_block_bytes,
            window_block_bytes=shard.window_block_bytes,
            products=shard.products,
            slow_paths=shard.slow_paths,
            settings=load.settings,
        )
    )


def _draft_launch(settings: ChildSettings, load: LoadShard, options: BackendOptions, model: ModelBounds) -> DraftLaunch:
    """Return what the draft model's process loads: on this device, with the backend's options of the stage."""
    return DraftLaunch(
        path=load.draft_path,
        backend=settings.backend,
        device=options.device,
        threads=options.threads,
        dtype=options.dtype,
        settings={name: value for name, value in options.settings.items() if name != SETTING},
        context_length=model.context_length,
        vocab_size=model.vocab_size,
    )


def _progress(stage: Stage | None) -> ChildProgress:
    if stage is None:
        return ChildProgress(limit_ms=round(_IMPORT_S * 1e3))
    progress = stage.progress()
    return ChildProgress(
        received=progress.received,
        started=progress.started,
        finished=progress.finished,
        sent=progress.sent,
        limit_ms=round(progress.limit_s * 1e3),
        fenced=progress.strays,
        disk_bytes=progress.disk_bytes,
        kv_blocks=progress.kv_blocks,
        host_blocks=progress.host_blocks,
        disk_blocks=progress.disk_blocks,
    )


def _read_tokenizer(path: Path) -> Tokenizer:
    return StoredModel(path.name, path).tokenizer()


def _options(settings: ChildSettings, wanted: StageSettings, ram_percent: int = 0) -> BackendOptions:
    """Return the backend's options for a served model, or for a measurement."""
    chosen = replace(wanted.of_backend(), dtype=wanted.dtype_on(settings.dtype))
    return BackendOptions(
        device=settings.device,
        threads=settings.threads or None,
        settings=settings.backend_options | ({SETTING: as_setting(ram_percent)} if ram_percent else {}),
        **{each.name: getattr(chosen, each.name) for each in fields(StageSettings)},
    )
