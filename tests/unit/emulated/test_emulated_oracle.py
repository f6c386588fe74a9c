"""The emulated pipeline against its oracle, and the oracle against plain Python integers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from edgepipe_emulated import EmulatedBackend, EmulatedWeights, emulated_model_config, oracle
from edgepipe_emulated.arithmetic import layer_keys, position_weights
from hypothesis import given, settings
from hypothesis import strategies as st

from edgepipe.backend.types import ActivationType, BackendOptions, BlockRun, Step, StepRow
from edgepipe.ids import SequenceId, StepId
from edgepipe.spec.facts import LayerRange, ModelConfig, make_slices

CONFIG = emulated_model_config(num_layers=6)
PROMPT = list(b"what is a pipeline?")
OPTIONS = {"time_factor": "0"}


class Pipeline:
    """Stages in a row, called directly; ``tamper`` may change what stage ``i`` receives."""

    def __init__(self, cuts: Sequence[int], config: ModelConfig = CONFIG, kind: ActivationType = ActivationType.BF16):
        bounds = [0, *cuts, config.num_layers]
        ranges = [LayerRange(a, b) for a, b in itertools.pairwise(bounds)]
        self.stages: list[EmulatedBackend] = []
        for part in make_slices(ranges, config.num_layers):
            stage = EmulatedBackend(BackendOptions(activation_type=kind, settings=OPTIONS))
            stage.load([part], EmulatedWeights(config), lambda _progress: None)
            stage.allocate_kv(num_blocks=24, block_size=16)
            self.stages.append(stage)

    def step(self, row: StepRow, tokens: Sequence[int], tamper=None) -> int:
        """The token after ``row``."""
        data, logits = np.asarray(tokens, dtype=np.int32), None
        for index, stage in enumerate(self.stages):
            last = np.array([row.num_tokens - 1], dtype=np.int32)
            step = Step(step=StepId(1), slice_index=index, rows=(row,), logit_rows=last)
            if tamper is not None and index > 0:
                data = tamper(data)
            output = stage.collect(stage.submit(stage.prepare(step), data))
            if output.activations is not None:
                data = output.activations
            logits = output.logits
        assert logits is not None
        return int(logits[0].argmax())

    def generate(self, prompt: Sequence[int], n: int, runs: tuple[BlockRun, ...]) -> list[int]:
        tokens = [self.step(row_at(0, len(prompt), runs), prompt)]
        while len(tokens) < n:
            tokens.append(self.step(row_at(len(prompt) + len(tokens) - 1, 1, runs), tokens[-1:]))
        return tokens


def row_at(position: int, num_tokens: int, runs: tuple[BlockRun, ...] = (BlockRun(3, 8),)) -> StepRow:
    return StepRow(sequence=SequenceId(1), position=position, num_tokens=num_tokens, runs=runs)


def in_plain_integers(tokens: Sequence[int], config: ModelConfig) -> int:
    """The definition in ``arithmetic``'s docstring, written once more with Python's own integers."""
    top = 2**64

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % top
        x = (x ^ x >> 27) * 0x94D049BB133111EB % top
        return x ^ x >> 31

    states = [mix((token + 1) * 0x9E3779B97F4A7C15 % top) for token in tokens]
    weights = [int(w) for w in position_weights(0, len(tokens))]
    for key in map(int, layer_keys(0, config.num_layers)):
        attended = 0
        for p, x in enumerate(states):
            attended += (x ^ weights[p]) * key * weights[p]
            x = (x + attended) * key % top
            states[p] = x ^ x >> 29
    return mix(states[-1]) % config.vocab_size


def test_oracle_follows_its_definition() -> None:
    assert [oracle.next_token(PROMPT[:n], CONFIG) for n in range(1, 12)] == [
        in_plain_integers(PROMPT[:n], CONFIG) for n in range(1, 12)
    ]


def test_answers_are_the_same_in_every_version() -> None:
    assert oracle.generate(PROMPT, 8, CONFIG, ignore_eos=True) == GOLDEN


@pytest.mark.parametrize("kind", list(ActivationType))
@settings(deadline=None, max_examples=25)
@given(
    cuts=st.sets(st.integers(1, 5)),
    prompt=st.lists(st.integers(0, 255), min_size=1, max_size=40),
    table=st.permutations(range(24)),
)
def test_every_split_and_block_table_gives_the_oracles_tokens(
    kind: ActivationType, cuts: set[int], prompt: list[int], table: list[int]
) -> None:
    runs = tuple(BlockRun(block, 1) for block in table[:4])
    tokens = Pipeline(sorted(cuts), kind=kind).generate(prompt, 10, runs)
    assert tokens == oracle.generate(prompt, 10, CONFIG, ignore_eos=True)


@pytest.mark.parametrize("kind", list(ActivationType))
@pytest.mark.parametrize("element", [0, 3, 4, 17, 63])
def test_any_altered_element_gives_a_wrong_token(kind: ActivationType, element: int) -> None:
    def flip(activations: np.ndarray) -> np.ndarray:
        altered = activations.copy()
        altered.view(np.uint8).reshape(len(altered), -1)[-1, element * kind.num_bytes] ^= 1
        return altered

    assert Pipeline([3], kind=kind).step(row_at(0, len(PROMPT)), PROMPT, flip) != oracle.next_token(PROMPT, CONFIG)


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0, 70000.0, 0.5])
def test_numbers_that_are_no_states_are_wrong_tokens_not_crashes(value: float) -> None:
    def spoil(activations: np.ndarray) -> np.ndarray:
        altered = activations.copy()
        altered[-1] = value
        return altered

    pipeline = Pipeline([3], kind=ActivationType.FLOAT32)
    assert pipeline.step(row_at(0, len(PROMPT)), PROMPT, spoil) != oracle.next_token(PROMPT, CONFIG)


def test_activations_of_another_step_give_a_wrong_token() -> None:
    held: list[np.ndarray] = []

    def hold(activations: np.ndarray) -> np.ndarray:
        held.append(activations)
        return activations

    pipeline = Pipeline([2])
    first = pipeline.step(row_at(0, len(PROMPT)), PROMPT, hold)
    second = pipeline.step(row_at(len(PROMPT), 1), [first], hold)
    third = pipeline.step(row_at(len(PROMPT) + 1, 1), [second], lambda _activations: held[1])
    assert third != oracle.next_token([*PROMPT, first, second], CONFIG)


def test_swapped_rows_give_wrong_tokens() -> None:
    pipeline = Pipeline([2])
    swapped = pipeline.step(row_at(0, len(PROMPT)), PROMPT, lambda activations: activations[::-1].copy())
    assert swapped != oracle.next_token(PROMPT, CONFIG)


def test_generation_ends_behind_eos_unless_ignored() -> None:
    prompt = next([n] for n in range(256) if CONFIG.eos_token_ids[0] in oracle.generate([n], 40, CONFIG))
    tokens = oracle.generate(prompt, 40, CONFIG)
    assert tokens[-1] == CONFIG.eos_token_ids[0]
    assert len(tokens) < 40
    assert oracle.generate(prompt, 40, CONFIG, ignore_eos=True)[: len(tokens)] == tokens


def test_logits_are_small_integers_with_one_maximum() -> None:
    logits = oracle.logits(PROMPT, CONFIG)
    assert np.array_equal(logits, logits.round())
    assert logits.min() >= 0
    assert np.flatnonzero(logits == logits.max()).tolist() == [oracle.next_token(PROMPT, CONFIG)]
    assert 26 <= np.sort(logits)[-2] < logits.max()


def test_generation_with_a_choice_of_ones_own() -> None:
    second_best = oracle.generate(
        PROMPT, 3, CONFIG, ignore_eos=True, choose=lambda row, _position: int(row.argsort()[-2])
    )
    assert len(second_best) == 3
    assert second_best[0] != oracle.next_token(PROMPT, CONFIG)


GOLDEN = [103, 163, 98, 257, 138, 17, 192, 32]
