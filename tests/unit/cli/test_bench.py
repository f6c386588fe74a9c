"""``edgepipe bench`` before anything is started: what a run is made of, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgepipe.cli.bench.cluster import _store_model
from edgepipe.cli.bench.verb import emulated_run
from edgepipe.errors import ConfigInvalid, NoFeasiblePlacement
from edgepipe.store.store import ModelStore
from edgepipe.wire.engines import DeviceSpan
from edgepipe.wire.step_clocks import clock_offsets_s
from tests.support.processes.command_line import Run

RING = {"emulate": "2x rtx4090, m4max", "as-model": "qwen2.5-7b", "requests": "8"}


def test_a_run_says_which_devices_serve_what_over_which_network() -> None:
    made = emulated_run({**RING, "link": "100mbit,5ms", "policy": "sarathi", "micro-batches": "5"}, "slow")
    assert made.cluster.devices == ("rtx4090", "rtx4090", "m4max")
    assert (made.cluster.link, made.cluster.settings) == ("100mbit,5ms", {"jitter": "0.05"})
    assert made.cluster.config.num_layers == 28
    assert sorted(part[:2] for part in made.serve.plan.split(",")) == ["a:", "b:", "c:"]
    assert (made.serve.options.policy, made.serve.options.micro_batches) == ("sarathi", 5)
    assert made.run.label == "slow"
    assert made.run.settings["devices"] == "2x rtx4090, m4max"


def test_simulator_and_bench_have_the_same_room_for_sequences() -> None:
    made = emulated_run({**RING, "kv-tokens": "1600"})
    assert made.serve.options.kv_tokens == 1600
    assert emulated_run(RING).serve.options.kv_tokens > 100_000


def test_a_model_that_does_not_fit_is_refused_before_anything_starts() -> None:
    with pytest.raises(NoFeasiblePlacement):
        emulated_run({**RING, "as-model": "llama-3.3-70b:bf16"})


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--emulate", "4x toaster"), ["toaster"]),
        (("--emulate", "rtx4090", "--link", "fast"), ["fast", "1gbit,0.3ms"]),
        (("--emulate", "rtx4090", "--as-model", "qwen2.5-7b", "--policy", "fair"), ["fair", "sarathi"]),
        (("--emulate", "rtx4090", "--as-model", "qwen2.5-7b", "--itl-goal", "100"), ["--itl-goal", "100ms or 0.3s"]),
        (("--emulate", "rtx4090", "--model", "x"), ["--emulate"]),
        (("--link", "1gbit"), ["--link", "--emulate"]),
        (("--compare", "policy=throttled,sarathi"), ["--policy", "--emulate"]),
        (("--compare", "colour=red,blue"), ["colour"]),
    ],
)
def test_what_cannot_be_measured_is_refused(run: Run, flags: tuple[str, ...], words: list[str]) -> None:
    result = run("bench", *flags)
    assert (result.code, result.out) == (2, "")
    assert all(word in result.err for word in words)


def test_without_a_node_it_says_how_to_get_one(run: Run) -> None:
    result = run("bench")
    assert result.code != 0
    assert "node" in result.err


def test_an_unknown_model_is_refused_with_the_nearest_names(run: Run) -> None:
    result = run("bench", "--emulate", "rtx4090", "--as-model", "gpt-9")
    assert result.code != 0
    assert "nearest known names: gpt-oss-20b" in result.err


def test_clocks_of_one_machine_are_left_alone() -> None:
    spans = [
        (DeviceSpan(1_000, 2_000), DeviceSpan(2_500, 3_000)),
        (DeviceSpan(2_000, 3_000), DeviceSpan(3_100, 4_000)),
    ]
    assert clock_offsets_s(spans) == [0.0, 0.0]


def test_clocks_of_other_machines_are_laid_edge_to_edge() -> None:
    far = 500_000_000_000
    spans = [
        (DeviceSpan(1_000, 2_000), DeviceSpan(far + 2_500, far + 3_000)),
        (DeviceSpan(2_000, 3_000), DeviceSpan(far + 3_100, far + 4_000)),
    ]
    assert clock_offsets_s(spans) == pytest.approx([0.0, (far + 100) * 1e-6])


def test_without_steps_there_are_no_clocks() -> None:
    with pytest.raises(ConfigInvalid):
        emulated_run({**RING, "requests": "none"})
    assert clock_offsets_s([]) == []


def test_an_imagined_draft_model_is_a_setting_of_the_emulated_machines() -> None:
    made = emulated_run({**RING, "draft": "0.7,3ms"})
    assert (made.cluster.settings["draft_acceptance"], made.cluster.settings["draft_time"]) == ("0.7", "3ms")
    assert made.serve.options.draft == ""
    assert emulated_run(RING).serve.options.draft == "off"
    assert emulated_run({**RING, "draft": "lookup"}).serve.options.draft == "lookup"
    for text in ("0.7", "1.7,3ms", "mtp"):
        with pytest.raises(ConfigInvalid):
            emulated_run({**RING, "draft": text})


def test_an_emulated_model_has_no_layer_of_its_own_for_drafts(tmp_path: Path) -> None:
    """``serve`` would place that layer and ask it for drafts, instead of the imagined draft model."""
    cluster = emulated_run({**RING, "as-model": "qwen3.6-35b-a3b:q4_k_m", "draft": "0.7,3ms"}).cluster
    assert cluster.config.mtp is not None
    _store_model(tmp_path / "models", tmp_path / cluster.served_name, cluster)
    (stored,) = ModelStore(tmp_path / "models").list()
    assert (stored.config.mtp, stored.config.num_layers) == (None, cluster.config.num_layers)
