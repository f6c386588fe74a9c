"""What every backend must do. Results are logits of all tokens, so that each says what its token attended to."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from edgepipe.backend.protocol import Backend, Ticket
from edgepipe.backend.types import ActivationType, LoadProgress, ScoreRows, StepRow
from edgepipe.errors import DeviceOutOfMemory, ShardMismatch
from edgepipe.spec.facts import ModelConfig, Slice
from edgepipe.spec.kv_forms import SPAN_TOKENS
from edgepipe.testing.tiny_model import TinyWeights, tiny_config
from tests.support.backends.maker import CONFIGS, Maker, cut
from tests.support.backends.steps import make_step, result_of, run_step, step_row, token_ids

LLAMA = tiny_config()
PROMPT = np.random.default_rng(5).integers(0, LLAMA.vocab_size, 640).tolist()
OTHER = np.random.default_rng(6).integers(0, LLAMA.vocab_size, 640).tolist()


def run(backend: Backend, *work: tuple[StepRow, Sequence[int]], copies: Sequence[tuple[int, int]] = ()) -> np.ndarray:
    """Logits of all tokens of one step of a whole model."""
    step = make_step([row for row, _tokens in work], copies=copies)
    return run_step(backend, step, token_ids(*(tokens for _row, tokens in work)))


def whole_prompt(maker: Maker, config: ModelConfig, tokens: Sequence[int]) -> np.ndarray:
    """Logits of every token, computed by a fresh backend in one step."""
    return computed_once(maker, config, tuple(tokens))


@cache
def computed_once(maker: Maker, config: ModelConfig, tokens: tuple[int, ...]) -> np.ndarray:
    logits = run(maker.loaded(config), (step_row(0, len(tokens), (0, 4)), tokens))
    logits.flags.writeable = False
    return logits


def in_turns(values: Sequence[list[int]], maker: Maker, config: ModelConfig) -> list[int]:
    """Return one of the values, so that every two of value, shape and kind of backend or of KV meet somewhere."""
    names = [each().architecture for each in CONFIGS.values()]
    kinds = ["emulated", "torch", "mlx"].index(maker.name) + ["", "8bit", "4bit"].index(maker.kv)
    return values[(names.index(config.architecture) + kinds) % len(values)]


class TestShapes:
    @pytest.mark.parametrize("kind", list(ActivationType))
    def test_every_slice_gives_what_the_next_one_takes(self, maker: Maker, kind: ActivationType) -> None:
        row = step_row(0, 5, (0, 1))
        data = token_ids(PROMPT[:5])
        for index in range(3):
            backend = maker.loaded(LLAMA, cuts=[1, 3], take=[index], kind=kind)
            output = backend.collect(backend.submit(backend.prepare(make_step([row], slice_index=index)), data))
            data = result_of(output)
            assert (output.activations is None) == (index == 2)
            assert (output.logits is None) == (index < 2)
            assert data.shape == ((5, LLAMA.hidden_size) if index < 2 else (5, LLAMA.vocab_size))
            assert data.dtype == (kind.numpy if index < 2 else np.float32)
            assert data.flags.c_contiguous

    def test_floats_have_no_packed_products(self, maker: Maker) -> None:
        assert not maker.loaded(LLAMA).packed_products()

    def test_logits_come_in_the_order_they_were_asked_for(self, maker: Maker) -> None:
        backend = maker.loaded(LLAMA)
        everything = run(backend, (step_row(0, 6, (0, 1)), PROMPT[:6]))
        step = make_step([step_row(0, 6, (0, 1))], logit_rows=[4, 0, 5])
        maker.assert_same(run_step(backend, step, token_ids(PROMPT[:6])), everything[[4, 0, 5]])

    def test_a_chunk_that_is_not_the_last_asks_for_no_logits(self, maker: Maker) -> None:
        backend = maker.loaded(LLAMA)
        step = make_step([step_row(0, 6, (0, 1))], logit_rows=[])
        assert run_step(backend, step, token_ids(PROMPT[:6])).shape == (0, LLAMA.vocab_size)
        rest = run(backend, (step_row(6, 4, (0, 1)), PROMPT[6:10]))
        maker.assert_same(rest, whole_prompt(maker, LLAMA, PROMPT[:10])[6:])

    def test_outputs_stay_when_later_steps_run(self, maker: Maker) -> None:
        backend = maker.loaded(LLAMA)
        first = run(backend, (step_row(0, 6, (0, 1)), PROMPT[:6]))
        kept = first.copy()
        run(backend, (step_row(0, 6, (1, 1)), OTHER[:6]))
        np.testing.assert_array_equal(first, kept)


class TestScores:
    def test_known_tokens_are_scored_as_their_logits_say(self, maker: Maker) -> None:
        scores = ScoreRows(rows=np.arange(11, dtype=np.int32), targets=token_ids(PROMPT[1:12]), num_top=3)
        step = make_step([step_row(0, 12, (0, 1))])
        step = replace(step, logit_rows=np.array([11], np.int32), scores=scores)
        backend = maker.loaded(LLAMA)
        output = backend.collect(backend.submit(backend.prepare(step), token_ids(PROMPT[:12])))
        logits = whole_prompt(maker, LLAMA, PROMPT[:12])
        assert output.logits is not None
        maker.assert_same(output.logits, logits[11:])
        scored = output.scores
        assert scored is not None
        maker.assert_same(scored.logits, np.take_along_axis(logits[:11], scores.targets[:, None].astype(int), 1)[:, 0])
        exact = logits[:11].astype(np.float64)
        np.testing.assert_allclose(scored.log_totals, np.log(np.exp(exact).sum(axis=1)), rtol=maker.rounding)
        maker.assert_same(scored.top_logits, -np.sort(-logits[:11], axis=1)[:, :3])
        maker.assert_same(np.take_along_axis(logits[:11], scored.top_ids.astype(int), 1), scored.top_logits)


class TestSplits:
    def test_any_split_computes_what_the_whole_model_does(self, maker: Maker, config: ModelConfig) -> None:
        cuts = in_turns([[1, 3], [1, 2, 3]], maker, config)
        stages = [maker.loaded(config, cuts=cuts, take=[index]) for index in range(len(cuts) + 1)]
        for position, count in ((0, 12), (12, 1), (13, 7)):
            data = token_ids(PROMPT[position : position + count])
            for index, stage in enumerate(stages):
                data = run_step(stage, make_step([step_row(position, count, (0, 2))], slice_index=index), data)
            expected = whole_prompt(maker, config, PROMPT[: position + count])[position:]
            maker.assert_same(data, expected)

    def test_one_backend_runs_several_slices_with_kv_of_their_own(self, maker: Maker) -> None:
        backend = maker.loaded(LLAMA, cuts=[1, 3])
        for position, count in ((0, 12), (12, 3)):
            data = token_ids(PROMPT[position : position + count])
            for index in range(3):
                data = run_step(backend, make_step([step_row(position, count, (0, 1))], slice_index=index), data)
            maker.assert_same(data, whole_prompt(maker, LLAMA, PROMPT[: position + count])[position:])

    def test_bf16_links_stay_close_to_links_that_do_not_round(self, maker: Maker) -> None:
        data = token_ids(PROMPT[:12])
        for index in range(2):
            backend = maker.loaded(LLAMA, cuts=[2], take=[index], kind=ActivationType.BF16)
            data = run_step(backend, make_step([step_row(0, 12, (0, 1))], slice_index=index), data)
        exact = whole_prompt(maker, LLAMA, PROMPT[:12])
        assert float(np.abs(data - exact).max()) < max(0.05, maker.rounding) * float(np.abs(exact).max())


class TestBatches:
    def test_a_prompt_in_chunks_is_the_prompt(self, maker: Maker, config: ModelConfig) -> None:
        chunks = in_turns([[7, 9, 7], [1, 15, 6, 1]], maker, config)
        backend = maker.loaded(config)
        found, position = [], 0
        for count in chunks:
            found.append(run(backend, (step_row(position, count, (2, 2)), PROMPT[position : position + count])))
            position += count
        maker.assert_same(np.concatenate(found), whole_prompt(maker, config, PROMPT[:23]))

    def test_decoding_token_by_token_is_the_prompt(self, maker: Maker, config: ModelConfig) -> None:
        backend = maker.loaded(config)
        found = [run(backend, (step_row(i, 1, (0, 2)), [PROMPT[i]])) for i in range(20)]
        maker.assert_same(np.concatenate(found), whole_prompt(maker, config, PROMPT[:20]))

    def test_a_ragged_micro_batch_is_its_rows_alone(self, maker: Maker, config: ModelConfig) -> None:
        backend = maker.loaded(config)
        run(backend, (step_row(0, 17, (3, 2), sequence=2), OTHER[:17]))
        run(backend, (step_row(0, 9, (5, 2), sequence=3), PROMPT[5:14]))
        mixed = run(
            backend,
            (step_row(0, 13, (0, 1), sequence=1), PROMPT[:13]),
            (step_row(17, 1, (3, 2), sequence=2), [OTHER[17]]),
            (step_row(9, 8, (5, 2), sequence=3), PROMPT[14:22]),
            (step_row(0, 1, (8, 1), sequence=4), [OTHER[0]]),
        )
        maker.assert_same(mixed[:13], whole_prompt(maker, config, PROMPT[:13]))
        maker.assert_same(mixed[13:14], whole_prompt(maker, config, OTHER[:18])[17:])
        maker.assert_same(mixed[14:22], whole_prompt(maker, config, PROMPT[5:22])[9:])
        maker.assert_same(mixed[22:], whole_prompt(maker, config, OTHER[:1]))

    def test_many_decoding_sequences_are_each_their_own(self, maker: Maker) -> None:
        backend = maker.loaded(LLAMA)
        tokens = {i: [(7 * i + 3 * j) % LLAMA.vocab_size for j in range(i + 2)] for i in range(10)}
        for i, sequence in tokens.items():
            run(backend, (step_row(0, len(sequence) - 1, (i, 1), sequence=i), sequence[:-1]))
        together = run(
            backend,
            *((step_row(len(s) - 1, 1, (i, 1), sequence=i), s[-1:]) for i, s in reversed(tokens.items())),
        )
        for i, logits in zip(reversed(tokens), together, strict=True):
            maker.assert_same(logits, whole_prompt(maker, LLAMA, tokens[i])[-1])


class TestKv:
    def test_scattered_blocks_are_a_run(self, maker: Maker, config: ModelConfig) -> None:
        backend = maker.loaded(config)
        table = ((9, 1), (3, 2), (0, 1))
        end = 2 * maker.block_size
        first = run(backend, (step_row(0, end - 2, *table), PROMPT[: end - 2]))
        rest = run(backend, (step_row(end - 2, 6, *table), PROMPT[end - 2 : end + 4]))
        last = run(backend, (step_row(end + 4, 1, *table), PROMPT[end + 4 : end + 5]))
        maker.assert_same(np.concatenate([first, rest, last]), whole_prompt(maker, config, PROMPT[: end + 5]))

    def test_a_run_that_grows_and_then_breaks_is_the_same_sequence(self, maker: Maker) -> None:
        backend = maker.loaded(LLAMA)
        size = maker.block_size
        run(backend, (step_row(0, size, (4, 1)), PROMPT[:size]))
        run(backend, (step_row(size, size, (4, 2)), PROMPT[size : 2 * size]))
        found = run(backend, (step_row(2 * size, 8, (4, 2), (1, 1)), PROMPT[2 * size : 2 * size + 8]))
        maker.assert_same(found, whole_prompt(maker, LLAMA, PROMPT[: 2 * size + 8])[2 * size :])

    def test_a_lower_position_truncates(self, maker: Maker) -> None:
        backend = maker.loaded(LLAMA)
        run(backend, (step_row(0, 20, (0, 2)), PROMPT[:20]))
        found = run(backend, (step_row(6, 3, (0, 2)), OTHER[:3]))
        maker.assert_same(found, whole_prompt(maker, LLAMA, PROMPT[:6] + OTHER[:3])[6:])
        found = run(backend, (step_row(9, 1, (0, 2)), OTHER[3:4]))
        maker.assert_same(found, whole_prompt(maker, LLAMA, PROMPT[:6] + OTHER[:4])[9:])

    def test_copied_blocks_stand_for_computed_ones_and_live_apart(self, maker: Maker) -> None:
        backend = maker.loaded(LLAMA)
        size, end = maker.block_size, 2 * maker.block_size
        run(backend, (step_row(0, end, (0, 3)), PROMPT[:end]))
        suffix = OTHER[:4]
        branched = run(backend, (step_row(end, 4, (5, 3), sequence=2), suffix), copies=[(0, 5), (1, 6)])
        maker.assert_same(branched, whole_prompt(maker, LLAMA, PROMPT[:end] + suffix)[end:])
        run(backend, (step_row(size, 3, (5, 3), sequence=2), OTHER[10:13]))
        found = run(backend, (step_row(end, 2, (0, 3)), PROMPT[end : end + 2]))
        maker.assert_same(found, whole_prompt(maker, LLAMA, PROMPT[: end + 2])[end:])

    def test_copies_reach_every_slice_of_the_stage(self, maker: Maker) -> None:
        backend = maker.loaded(LLAMA, cuts=[2])
        size = maker.block_size
        data = token_ids(PROMPT[:size])
        for index in range(2):
            data = run_step(backend, make_step([step_row(0, size, (0, 1))], slice_index=index), data)
        data = token_ids(PROMPT[size : size + 2])
        for index in range(2):
            copies = [(0, 7)] if index == 0 else []
            step = make_step([step_row(size, 2, (7, 2), sequence=2)], slice_index=index, copies=copies)
            data = run_step(backend, step, data)
        maker.assert_same(data, whole_prompt(maker, LLAMA, PROMPT[: size + 2])[size:])

    def test_shared_blocks_serve_two_sequences(self, maker: Maker) -> None:
        backend = maker.loaded(LLAMA)
        size = maker.block_size
        run(backend, (step_row(0, size, (0, 1)), PROMPT[:size]))
        both = run(
            backend,
            (step_row(size, 2, (0, 2)), PROMPT[size : size + 2]),
            (step_row(size, 2, (0, 1), (8, 1), sequence=2), OTHER[:2]),
        )
        maker.assert_same(both[:2], whole_prompt(maker, LLAMA, PROMPT[: size + 2])[size:])
        maker.assert_same(both[2:], whole_prompt(maker, LLAMA, PROMPT[:size] + OTHER[:2])[size:])

    def test_blocks_used_before_are_as_good_as_fresh_ones(self, maker: Maker) -> None:
        backend = maker.loaded(LLAMA)
        run(backend, (step_row(0, 40, (0, 3)), OTHER[:40]))
        found = run(backend, (step_row(0, 5, (1, 1), sequence=2), PROMPT[:5]))
        maker.assert_same(found, whole_prompt(maker, LLAMA, PROMPT[:5]))

    def test_a_sequences_identity_does_not_matter(self, maker: Maker) -> None:
        backend = maker.loaded(LLAMA)
        run(backend, (step_row(0, 8, (0, 1), sequence=1), PROMPT[:8]))
        found = run(backend, (step_row(8, 1, (0, 1), sequence=77), PROMPT[8:9]))
        maker.assert_same(found, whole_prompt(maker, LLAMA, PROMPT[:9])[8:])

    def test_decoding_reads_only_its_own_kv(self, maker: Maker) -> None:
        size = maker.block_size
        length = size + size // 4
        expected = whole_prompt(maker, LLAMA, PROMPT[: length + 1])[length:]

        def decode_after(block: int) -> np.ndarray:
            """Overwrite one block with another sequence's tokens, then decode the sequence in blocks 2 and 3."""
            backend = maker.loaded(LLAMA)
            run(backend, (step_row(0, length, (2, 2)), PROMPT[:length]))
            run(backend, (step_row(0, size, (block, 1), sequence=2), OTHER[:size]))
            return run(backend, (step_row(length, 1, (2, 2)), PROMPT[length : length + 1]))

        maker.assert_same(decode_after(1), expected)
        maker.assert_same(decode_after(4), expected)
        maker.assert_different(decode_after(2), expected)
        maker.assert_different(decode_after(3), expected)

    def test_decoding_with_empty_kv_is_wrong(self, maker: Maker) -> None:
        found = run(maker.loaded(LLAMA), (step_row(20, 1, (2, 2)), PROMPT[20:21]))
        maker.assert_different(found, whole_prompt(maker, LLAMA, PROMPT[:21])[20:])

    def test_block_bytes_grow_with_layers_and_tokens(self, maker: Maker) -> None:
        backend = maker.bare()

        def block_bytes(slices: Sequence[Slice], block_size: int = 16) -> int:
            return backend.kv_block_bytes(LLAMA, slices, block_size)

        single, three = cut(LLAMA, [1])
        assert block_bytes([single]) > 0
        assert block_bytes([three]) == 3 * block_bytes([single])
        assert block_bytes([single, three], 32) == 8 * block_bytes([single])

    def test_a_pool_that_cannot_fit_is_refused(self, maker: Maker) -> None:
        backend = maker.loaded(LLAMA)
        with pytest.raises(DeviceOutOfMemory):
            backend.allocate_kv(num_blocks=2**36, block_size=16)


class TestOrder:
    def test_preparing_twice_changes_nothing(self, maker: Maker) -> None:
        backend = maker.loaded(LLAMA)
        run(backend, (step_row(0, 8, (0, 1)), PROMPT[:8]))
        step = make_step([step_row(8, 2, (0, 1))])
        backend.prepare(make_step([step_row(0, 3, (0, 1))], copies=[(5, 0)]))
        first, second = backend.prepare(step), backend.prepare(step)
        expected = whole_prompt(maker, LLAMA, PROMPT[:10])[8:]
        for prepared in (second, first):
            output = backend.collect(backend.submit(prepared, token_ids(PROMPT[8:10])))
            maker.assert_same(result_of(output), expected)

    def test_preparing_ahead_on_another_thread(self, maker: Maker) -> None:
        backend = maker.loaded(LLAMA)
        steps = [make_step([step_row(i, 1, (0, 1))], step=i + 1) for i in range(10)]
        found = []
        with ThreadPoolExecutor(1) as other:
            prepared = other.submit(backend.prepare, steps[0])
            for i in range(10):
                ticket = backend.submit(prepared.result(timeout=30), token_ids(PROMPT[i : i + 1]))
                if i < 9:
                    prepared = other.submit(backend.prepare, steps[i + 1])
                found.append(result_of(backend.collect(ticket)))
        maker.assert_same(np.concatenate(found), whole_prompt(maker, LLAMA, PROMPT[:10]))

    def test_as_many_steps_as_it_allows_may_be_submitted(self, maker: Maker) -> None:
        backend = maker.loaded(LLAMA)
        depth = backend.max_submitted
        assert depth >= 1
        found: list[np.ndarray] = []
        waiting: list[Ticket] = []
        for i in range(12):
            prepared = backend.prepare(make_step([step_row(i, 1, (0, 1))], step=i + 1))
            waiting.append(backend.submit(prepared, token_ids(PROMPT[i : i + 1])))
            if len(waiting) == depth:
                found.append(result_of(backend.collect(waiting.pop(0))))
        found += [result_of(backend.collect(ticket)) for ticket in waiting]
        maker.assert_same(np.concatenate(found), whole_prompt(maker, LLAMA, PROMPT[:12]))

    def test_inputs_may_be_reused_once_the_step_is_collected(self, maker: Maker) -> None:
        backend = maker.loaded(LLAMA, cuts=[2], take=[0])
        tokens = token_ids(PROMPT[:4])
        first = run_step(backend, make_step([step_row(0, 4, (0, 1))]), tokens)
        kept = first.copy()
        tokens[:] = token_ids(OTHER[:4])
        run_step(backend, make_step([step_row(4, 4, (0, 1))]), tokens)
        np.testing.assert_array_equal(first, kept)

    def test_inputs_may_be_read_only_views(self, maker: Maker) -> None:
        stages = [maker.loaded(LLAMA, cuts=[2], take=[index]) for index in range(2)]
        sent = run_step(stages[0], make_step([step_row(0, 4, (0, 1))]), token_ids(PROMPT[:4]))
        received = sent.copy()
        received.flags.writeable = False
        found = run_step(stages[1], make_step([step_row(0, 4, (0, 1))], slice_index=1), received)
        maker.assert_same(found, whole_prompt(maker, LLAMA, PROMPT[:4]))


class TestMistakes:
    def test_activations_of_a_wrong_shape_are_refused_and_the_backend_serves_on(self, maker: Maker) -> None:
        stages = [maker.loaded(LLAMA, cuts=[2], take=[index]) for index in range(2)]
        sent = run_step(stages[0], make_step([step_row(0, 4, (0, 1))]), token_ids(PROMPT[:4]))
        step = make_step([step_row(0, 4, (0, 1))], slice_index=1)
        expected = whole_prompt(maker, LLAMA, PROMPT[:4])
        spoiled = {
            "a row short": sent[:-1],
            "too narrow": sent[:, :-1],
            "flat": sent.reshape(-1),
            "another type": sent.astype(np.float64),
        }
        for what, given in spoiled.items():
            with pytest.raises(ShardMismatch):
                pytest.fail(f"{what}: {run_step(stages[1], step, given)}")
            maker.assert_same(run_step(stages[1], step, sent), expected)

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_activations_that_are_no_numbers_spoil_their_own_sequence_alone(self, maker: Maker, value: float) -> None:
        stages = [maker.loaded(LLAMA, cuts=[2], take=[index]) for index in range(2)]
        step = make_step([step_row(0, 4, (0, 1)), step_row(0, 4, (1, 1))])
        sent = run_step(stages[0], step, token_ids(PROMPT[:4], OTHER[:4]))
        if maker.name == "emulated":
            pytest.skip("its activations are whole numbers")
        fine = run_step(stages[1], replace(step, slice_index=1), sent)
        spoiled = sent.copy()
        spoiled[1] = value
        logits = run_step(stages[1], replace(step, slice_index=1), spoiled)
        assert not np.isfinite(logits[3]).any(), "the last row has attended to the spoiled one"
        maker.assert_same(logits[4:], fine[4:])

    def test_token_ids_of_a_wrong_shape_are_refused(self, maker: Maker) -> None:
        backend = maker.loaded(LLAMA)
        spoiled = {
            "a token short": token_ids(PROMPT[:3]),
            "not flat": token_ids(PROMPT[:4]).reshape(2, 2),
            "another type": token_ids(PROMPT[:4]).astype(np.float32),
        }
        for what, tokens in spoiled.items():
            with pytest.raises(ShardMismatch):
                pytest.fail(f"{what}: {run_step(backend, make_step([step_row(0, 4, (0, 1))]), tokens)}")

    @pytest.mark.parametrize("token", [-1, LLAMA.vocab_size])
    def test_token_ids_outside_the_vocabulary_are_refused(self, maker: Maker, token: int) -> None:
        with pytest.raises(ShardMismatch):
            run(maker.loaded(LLAMA), (step_row(0, 1, (0, 1)), [token]))

    def test_a_slice_that_is_not_loaded_is_refused(self, maker: Maker) -> None:
        backend = maker.loaded(LLAMA, cuts=[2], take=[1])
        with pytest.raises(ShardMismatch):
            run(backend, (step_row(0, 1, (0, 1)), [1]))


class TestLife:
    def test_loading_again_replaces_what_was_there(self, maker: Maker) -> None:
        backend = maker.loaded(LLAMA, cuts=[2], take=[0])
        backend.load(cut(LLAMA, []), TinyWeights(LLAMA), lambda _progress: None)
        backend.allocate_kv(num_blocks=4, block_size=maker.block_size)
        found = run(backend, (step_row(0, 6, (0, 1)), PROMPT[:6]))
        maker.assert_same(found, whole_prompt(maker, LLAMA, PROMPT[:6]))

    def test_a_pool_may_be_allocated_again(self, maker: Maker) -> None:
        backend = maker.loaded(LLAMA)
        run(backend, (step_row(0, 6, (0, 1)), OTHER[:6]))
        backend.allocate_kv(num_blocks=3, block_size=maker.block_size)
        maker.assert_same(run(backend, (step_row(0, 6, (2, 1)), PROMPT[:6])), whole_prompt(maker, LLAMA, PROMPT[:6]))

    @pytest.mark.parametrize("block_size", [16, 256])
    def test_the_size_of_a_block_changes_nothing(self, maker: Maker, block_size: int) -> None:
        config = replace(LLAMA, context_length=512)
        backend = maker.loaded(config)
        backend.allocate_kv(num_blocks=5, block_size=block_size)
        tokens = PROMPT[:300] if block_size == 256 else PROMPT[:20]
        table = ((3, 1), (1, 1))  # two blocks that are no run
        run(backend, (step_row(0, len(tokens) - 1, *table), tokens[:-1]), (step_row(0, 9, (4, 1)), OTHER[:9]))
        found = run(backend, (step_row(len(tokens) - 1, 1, *table), tokens[-1:]), (step_row(9, 1, (4, 1)), OTHER[9:10]))
        expected = maker.loaded(config)
        expected.allocate_kv(num_blocks=20, block_size=min(block_size, SPAN_TOKENS))  # as large spans of KV in 4 bits
        maker.assert_same(found[:1], run(expected, (step_row(0, len(tokens), (0, 20)), tokens))[-1:])
        maker.assert_same(found[1:], whole_prompt(maker, config, OTHER[:10])[-1:])

    def test_progress_covers_every_tensor_and_nothing_else_is_read(self, maker: Maker) -> None:
        backend = maker.bare()
        weights = TinyWeights(LLAMA)
        part = cut(LLAMA, [1])[1]
        progress: list[LoadProgress] = []
        backend.load([part], weights, progress.append)
        assert [item.bytes_done for item in progress] == sorted(item.bytes_done for item in progress)
        assert progress[-1].bytes_done == progress[-1].bytes_total
        assert weights.bytes_read in (0, sum(info.num_bytes for info in weights.tensors(part)))

    def test_closing_twice_and_before_loading(self, maker: Maker) -> None:
        maker.bare().close()
        backend = maker.loaded(LLAMA)
        backend.close()
        backend.close()

    def test_profile_says_what_the_device_is(self, maker: Maker) -> None:
        profile = maker.bare().profile()
        assert profile.backend == maker.name
        assert 0 < profile.memory_free_bytes <= profile.memory_total_bytes
        assert profile.bandwidth_bytes_per_s > 1e6  # any machine has more, however busy
        assert profile.flops > 1e6
        assert list(profile.block_sizes) == sorted(profile.block_sizes)
