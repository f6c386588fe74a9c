"""Settings of a pipeline that follow from the room on its nodes: KV tokens, the size of blocks, a placement by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from edgepipe.backend.types import DEFAULT_BLOCK_SIZE, DeviceProfile
from edgepipe.daemon.device.memory import modest_kv_bytes
from edgepipe.daemon.files.models import LocalModel
from edgepipe.daemon.serving.capacity import placement_need, stages_of
from edgepipe.daemon.serving.replanning import DEFAULT_SEQUENCE_TOKENS, DEFAULT_SEQUENCES, demand_of
from edgepipe.errors import NoFeasiblePlacement
from edgepipe.planner.expert_shares import place_with_shares, rooms_as_placed
from edgepipe.planner.placement import NodeRoom, Placed
from edgepipe.planner.plan import with_fewest_given_up
from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.kv_forms import block_tokens
from edgepipe.spec.memory_classes import most_within
from edgepipe.weights.weight_table import FLOATS, WeightTable
from edgepipe.wire.engines import ServeSpec
from edgepipe.wire.serving import Moves, ServeRequest


def placed_by_hand(
    request: ServeRequest, model: LocalModel, context: int, rooms: Sequence[NodeRoom]
) -> tuple[tuple[Placed, ...], int]:
    """Return the placement that the user wrote, and the bound on slots of states. Raises like ``place_by_plan``."""
    options = request.options
    need = placement_need(model.config, context, model.weights)
    demand = demand_of(model.config, options, weights=model.weights)

    def attempt(most_slots: int) -> tuple[tuple[Placed, ...], int]:
        bound = [replace(room, most_slots=most_slots) for room in rooms]
        return place_with_shares(need, bound, request.plan, options.experts_in_ram), most_slots

    return with_fewest_given_up(demand.slot_choices(), attempt)


def default_kv_tokens(
    config: ModelConfig,
    context: int,
    placed: Sequence[Placed],
    rooms: Sequence[NodeRoom],
    *,
    weights: WeightTable = FLOATS,
) -> int:
    """Return the default KV tokens: some long chats' worth, less where stages use the host's memory."""
    tokens = DEFAULT_SEQUENCES * min(context, DEFAULT_SEQUENCE_TOKENS)
    by_id = {room.node_id: room for room in rooms}
    for stage in placed:
        room = by_id[stage.node_id]
        if room.shares_host_memory:
            most = modest_kv_bytes(weight_bytes=room.sizes(config, weights).of_slice(stage.part))
            tokens = most_within(most, partial(room.kv_bytes, config, stage.part.layers), at_most=tokens)
    return max(tokens, context)


def pipeline_spec(
    request: ServeRequest,
    model: LocalModel,
    context: int,
    placed: Sequence[Placed],
    rooms: Sequence[NodeRoom],
    profiles: Iterable[DeviceProfile],
    *,
    most_slots: int,
) -> ServeSpec:
    """Return the spec of one pipeline. ``profiles``: of all devices. Raises NoFeasiblePlacement if its KV does not
    fit."""
    options = request.options
    rooms = [replace(room, most_slots=most_slots) for room in rooms_as_placed(rooms, placed)]
    check_kv_room(model.config, options.kv_tokens, placed, rooms, weights=model.weights)
    return replace(
        options,
        model=model.name,
        manifest_hash=model.manifest_hash,
        stages=stages_of(placed),
        settings=replace(
            options.settings,
            context_length=context,
            most_slots=most_slots,
            block_size=common_block_size(profiles, options.settings.kv),
            draft_model=model.draft.name if model.draft is not None else "",
            draft_hash=model.draft.manifest_hash if model.draft is not None else "",
        ),
        kv_tokens=options.kv_tokens or default_kv_tokens(model.config, context, placed, rooms, weights=model.weights),
        moves=request.moves is Moves.AUTO,
        fixed=bool(request.plan),
        must_keep_context=request.must_keep_context,
    )


def check_kv_room(
    config: ModelConfig,
    kv_tokens: int,
    placed: Sequence[Placed],
    rooms: Sequence[NodeRoom],
    *,
    weights: WeightTable,
) -> None:
    """Raise NoFeasiblePlacement if ``kv_tokens`` do not fit beside the weights."""
    by_id = {room.node_id: room for room in rooms}
    most = min(
        most_within(
            room.free_bytes - room.sizes(config, weights).of_slice(piece.part),
            partial(room.kv_bytes, config, piece.part.layers),
        )
        for piece in placed
        for room in (by_id[piece.node_id],)
    )
    if kv_tokens > most:
        raise NoFeasiblePlacement(
            f"--kv-tokens {kv_tokens} do not fit",
            fact=f"beside the weights there is room for {most} tokens",
            next_step=f"give --kv-tokens {most} or less, or leave it out",
        )


def common_block_size(profiles: Iterable[DeviceProfile], kv: str = "") -> int:
    """Return the tokens per KV block: the fewest that all devices serve well, as any device may hold a stage.

    kv  form of the KV
    """
    supported = [profile.block_sizes for profile in profiles if profile.block_sizes]
    common = (size for size in supported[0] if all(size in sizes for sizes in supported)) if supported else ()
    return block_tokens(kv, min(common, default=DEFAULT_BLOCK_SIZE))
