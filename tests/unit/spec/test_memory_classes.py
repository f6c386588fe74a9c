"""Memory classes: the same on every node, exact in bytes, and small for models with windows."""

from __future__ import annotations

import pytest
from edgepipe_emulated import EmulatedBackend, EmulatedWeights, emulated_model_config
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.backend.types import BackendOptions
from edgepipe.spec.facts import LayerRange, ModelConfig, Slice
from edgepipe.spec.kv_forms import REST_TOKENS
from edgepipe.spec.memory_classes import kv_bytes, memory_classes, most_within, pool_bytes
from edgepipe.weights.mixes import named_model

CONTEXT = 32_768


def windowed(*windows: int | None, context_length: int = 131_072, num_layers: int = 12) -> ModelConfig:
    return emulated_model_config(num_layers=num_layers, context_length=context_length, windows=windows)


def test_layers_are_of_the_class_of_their_window() -> None:
    classes = memory_classes(windowed(1024, None, 512))
    assert classes.windows == (512, 1024)
    assert classes.of_layer == (2, 0, 1) * 4


def test_a_model_without_layers_of_the_context_keeps_it_in_its_widest_window() -> None:
    assert memory_classes(windowed(512, 1024)).windows == (512,)
    assert memory_classes(windowed(512)).windows == ()


def test_a_window_as_long_as_the_context_is_no_class() -> None:
    assert memory_classes(windowed(512, None, context_length=512)).windows == ()


@pytest.mark.parametrize("model", ["gemma-3-27b", "gemma-3-12b"])
def test_a_gemma_keeps_at_most_three_tenths_of_the_context(model: str) -> None:
    config, _ = named_model(model)
    kept = sum(kv_bytes(config, CONTEXT, form="bfloat16"))
    assert kept <= 0.3 * CONTEXT * config.kv_bytes_per_token(form="bfloat16")


def test_a_stage_allocates_what_the_planner_counts() -> None:
    config = windowed(1024, 1024, 1024, 1024, 1024, None)
    part = Slice(index=0, layers=LayerRange(0, 12), embedding=True, head=True)
    backend = EmulatedBackend(BackendOptions(settings={"time_factor": "0"}))
    backend.load([part], EmulatedWeights(config), lambda _: None)
    free = backend.profile().memory_free_bytes
    num_blocks = CONTEXT // 16
    pools = memory_classes(config).pools(num_blocks=num_blocks, block_size=16)
    backend.allocate_kv(num_blocks=num_blocks, block_size=16, window_blocks=[pool.num_blocks for pool in pools])
    allocated = free - backend.profile().memory_free_bytes
    assert allocated == sum(kv_bytes(config, CONTEXT, form="bfloat16"))
    assert allocated <= 0.3 * CONTEXT * config.kv_bytes_per_token(form="bfloat16")


def test_a_short_context_needs_no_windows() -> None:
    classes = memory_classes(windowed(1024, None))
    assert classes.pools(num_blocks=100, block_size=16) == ()
    assert classes.kept_tokens(1600, block_size=16) == (1600,) * 12


@given(
    num_blocks=st.integers(1, 20_000),
    block_size=st.sampled_from([16, 64, 256]),
    windows=st.lists(st.integers(1, 5000), min_size=1, max_size=3, unique=True),
    room=st.integers(0, 10**9),
)
def test_pools_hold_a_sequence_and_the_most_blocks_fit(
    num_blocks: int, block_size: int, windows: list[int], room: int
) -> None:
    classes = memory_classes(windowed(None, *windows, context_length=65_536))
    pools = classes.pools(num_blocks=num_blocks, block_size=block_size)
    for pool in pools:
        assert min(num_blocks, pool.most_blocks) <= pool.num_blocks <= num_blocks
    assert classes.opened([pool.num_blocks for pool in pools], block_size=block_size) == pools
    window_bytes = [7 * (1 + number) for number in range(len(classes.windows))]
    block_bytes = 3 + sum(window_bytes)

    def taken(blocks: int) -> int:
        counts = [pool.num_blocks for pool in classes.pools(num_blocks=blocks, block_size=block_size)]
        return pool_bytes(block_bytes, window_bytes, blocks, counts)

    most = classes.most_blocks(
        block_bytes, window_bytes, state_bytes=0, block_size=block_size, room_bytes=room, wanted=num_blocks
    )
    assert taken(most) <= room
    assert most == num_blocks or taken(most + 1) > room


def test_in_a_large_pool_a_prompt_may_have_more_in_flight_which_takes_no_memory() -> None:
    classes = memory_classes(windowed(512, None))
    (small,), (large,) = (classes.pools(num_blocks=count, block_size=16) for count in (1_000, 40_000))
    assert small.most_slack == small.slack == large.slack
    assert 2 * large.slack < large.most_slack <= large.num_blocks * 16 // 4
    assert large.num_blocks == 40_000 // 8, "an eighth of the context's blocks, as for many short chats"


def test_a_window_saves_its_layers_blocks_that_its_pool_lacks() -> None:
    context, half, quarter = 10, 60, 30  # bytes of a block in the layers of each class
    block_bytes = context + half + quarter
    assert pool_bytes(block_bytes, (half, quarter), 8, (4, 2)) == 8 * context + 4 * half + 2 * quarter
    assert pool_bytes(block_bytes, (half, quarter), 8, ()) == 8 * block_bytes


@given(size=st.integers(1, 1000), room=st.integers(0, 10**12))
def test_one_class_fills_the_room_to_the_token(size: int, room: int) -> None:
    assert most_within(room, lambda count: size * count) == room // size


@given(
    num_blocks=st.integers(1, 5000),
    block_size=st.sampled_from([16, 64]),
    room=st.integers(0, 10**7),
    most_slots=st.sampled_from([0, 4, 9, 100]),
)
def test_slots_of_states_fit_beside_the_blocks(num_blocks: int, block_size: int, room: int, most_slots: int) -> None:
    config = emulated_model_config(num_layers=6, context_length=65_536, attention_every=3)
    classes = memory_classes(config)
    assert set(classes.of_layer) == {0}

    def needed(blocks: int) -> int:
        states = classes.states(num_blocks=blocks, block_size=block_size, most=most_slots)
        assert states is not None
        assert 4 <= states.num_slots <= (most_slots or states.num_slots)
        assert states.gap % block_size == 0
        return block_bytes * blocks + state_bytes * (states.num_slots + 1)

    block_bytes = block_size * config.kv_bytes_per_token(form="bfloat16")
    state_bytes = config.state_bytes()
    most = classes.most_blocks(
        block_bytes,
        (),
        state_bytes=state_bytes,
        block_size=block_size,
        room_bytes=room,
        wanted=num_blocks,
        most_slots=most_slots,
    )
    assert not most or needed(most) <= room
    assert most == num_blocks or needed(most + 1) > room


def test_a_model_without_recurrent_layers_has_no_slots() -> None:
    assert memory_classes(windowed(None)).states(num_blocks=100, block_size=16) is None
    assert windowed(None).state_bytes() == 0


@given(num_blocks=st.integers(1, 20_000), most_slots=st.integers(4, 64))
def test_fewer_snapshots_still_reach_over_the_whole_context(num_blocks: int, most_slots: int) -> None:
    config = emulated_model_config(num_layers=6, context_length=1 << 20, attention_every=3)
    states = memory_classes(config).states(num_blocks=num_blocks, block_size=16, most=most_slots)
    assert states is not None
    assert states.gap * (states.num_slots - 1) >= 16 * num_blocks - 16 * states.num_slots


def test_bytes_of_a_context_count_its_states() -> None:
    config = emulated_model_config(num_layers=6, context_length=65_536, attention_every=3)
    states = memory_classes(config).states(num_blocks=100, block_size=16)
    assert states is not None
    kv = config.kv_bytes_per_token(form="bfloat16") * 1600
    assert sum(kv_bytes(config, 1600, form="bfloat16")) == kv + (states.num_slots + 1) * config.state_bytes()


@pytest.mark.parametrize("windows", [(None,), (512, None, 1024)])
def test_4_bits_need_room_behind_a_sequence_s_tokens(windows: tuple[int | None, ...]) -> None:
    config = windowed(*windows)
    plain, packed = memory_classes(config), memory_classes(config, "4bit")
    assert (plain.rest_tokens, packed.rest_tokens) == (0, REST_TOKENS)
    own, whole = kv_bytes(config, 1600, form="4bit"), windows.index(None)  # a layer that keeps the context
    assert own[whole] == config.kv_bytes_per_token((whole,), form="4bit") * 1792, "7 blocks of 256"
    pools = zip(
        *(each.pools(num_blocks=4096, block_size=16) for each in (plain, packed)),
        strict=True,
    )
    assert all(more.most_blocks == few.most_blocks + 3 for few, more in pools)
