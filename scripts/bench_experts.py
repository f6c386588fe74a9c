"""Mixtures of experts without a GPU: logits and rings, emulated tokens, and a CPU's steps against the bytes they read.

    scripts/bench experts [--full] [PART ...]

Parts: ``logits``  tests of every family's logits against transformers, alone and in rings of torch and MLX
       ``truth``   emulated tokens under cancels, preemption and lost stages, each checked
       ``layers``  decode steps of layers with the shape of Qwen3-30B-A3B at Q4_K_M against the bytes that they read
       ``planned`` steps that the planner did not measure against its prediction
       ``ram``     steps of stages with experts in RAM: the planner's time of an emulated GPU by arithmetic, beside that
                   of whole layers in RAM, and this CPU's own steps with every expert behind the path to RAM

Rows of ``layers`` and ``planned`` are the probe's, whose routers prefer some experts. ``--full`` measures more rounds
and checks 500,000 tokens, which takes a quarter of an hour. Without it, some minutes on two quiet cores.
"""

from __future__ import annotations

import numpy as np
from edgepipe_torch import TorchBackend
from figures import Row, at_most
from layer_steps import BLOCK_TOKENS, CONTEXT_BLOCKS, LAYERS, Stage, counted_experts, layer_rows, read_rate
from parts import Part, counted, run_parts, tested
from truth import lossy_rows

from edgepipe.backend.cost import CostModel, SliceCost, StepWork
from edgepipe.backend.devices import named_device, parse_devices
from edgepipe.backend.types import BackendOptions
from edgepipe.planner.cluster import known_cluster
from edgepipe.planner.constraints import Constraints
from edgepipe.planner.demand import Demand, decode_work
from edgepipe.planner.plan import plan
from edgepipe.planner.profiles import measured_speed
from edgepipe.spec.facts import ModelConfig
from edgepipe.stage.probe import probe_layer
from edgepipe.system import SystemClock
from edgepipe.units import parse_link
from edgepipe.weights.mixes import named_model
from edgepipe.weights.weight_table import WeightTable

MODEL = "qwen3-30b-a3b:q4_k_m"
ROWS = (1, 4, 16, 64)
BETWEEN = (2, 8, 32)  # rows that the probe does not measure
RAM_PLACES = (
    ("qwen3-30b-a3b:q8_0", "rtx4090"),
    ("glm-4.5-air:q4_k_m", "rtx4090"),
    ("qwen3-235b-a22b:q4_k_m", "h100"),
)
RAM_ROWS = (1, 4, 16)
ROUNDS, FULL_ROUNDS = 6, 15
THREADS = (1, 2)
TOKENS, FULL_TOKENS = 10_000, 500_000
TESTS = {
    "logits on torch, tests": ("tests/numerics/test_transformers.py", "tests/numerics/test_gpt_oss.py"),
    "logits on MLX, tests": ("tests/unit/mlx/test_mlx_against_transformers.py",),
    "logits on MLX and rings of both, tests": (
        "tests/unit/mlx/test_mlx_families.py",
        "tests/unit/mlx/test_mlx_gpt_oss.py",
    ),
}


def logits_rows(_full: bool) -> list[Row]:
    """Run the tests that compare families with transformers: relative differences of 1e-4 at most, the same ids."""
    return [tested(name, files) for name, files in TESTS.items()]


def emulated_rows(full: bool) -> list[Row]:
    """Check emulated tokens with experts, of which each is an exact integer function of the sequence."""
    return lossy_rows("experts", FULL_TOKENS if full else TOKENS)


def steps_rows(full: bool) -> list[Row]:
    """Time the layers on one thread and on two."""
    config, table = named_model(MODEL)
    rounds = FULL_ROUNDS if full else ROUNDS
    rows: list[Row] = []
    for threads in THREADS:
        stage, shares = Stage(config, table, threads), threads == THREADS[0]
        rows += layer_rows(MODEL, stage, threads, rounds, counts=ROWS, target=2.2, shares=shares)
    return rows


def prediction_rows(full: bool) -> list[Row]:
    """Compare predicted with measured steps on one thread and on two."""
    config, table = named_model(MODEL)
    rounds = FULL_ROUNDS if full else ROUNDS
    return [
        row
        for threads in THREADS
        for row in planned_rows(Stage(config, table, threads), config, table, threads, rounds)
    ]


def ram_rows(full: bool) -> list[Row]:
    """Compare steps with experts in RAM with the larger of the device's and the RAM's memory time."""
    config, table = named_model(MODEL)
    rounds = FULL_ROUNDS if full else ROUNDS
    rows = [row for model, device in RAM_PLACES for row in emulated_ram_rows(model, device)]
    threads = THREADS[-1]
    for in_ram, word in (("all", "all"), ("50%", "half")):
        stage, read_per_s = Stage(config, table, threads, in_ram=in_ram), read_rate(threads)
        for count in (1, 4):
            step = stage.step(count)
            with counted_experts() as shares:
                step()
            step_s = min(step() for _ in range(rounds))
            memory_s = (stage.other_bytes + float(np.mean(shares)) * stage.expert_bytes) / read_per_s
            what = f"measured: layer with {word} of its experts behind the path to RAM"
            name = f"{what}, {counted(count, 'row')}, {counted(threads, 'thread')}"
            taken, least = 1e3 * step_s / LAYERS, 1e3 * memory_s / LAYERS
            rows.append(Row(name, taken, "ms", least, "memory time", taken / least))
    return rows


def emulated_ram_rows(model: str, device: str) -> list[Row]:
    """Compare the planner's step of an emulated device with the larger memory time, and with whole layers in RAM.

    With the share that the planner chooses, and with the share at which both memory times are most alike.
    """
    config, table = named_model(model)
    cluster = known_cluster(
        parse_devices(device), config, link=parse_link("ideal"), weights=table, adjustments={"ram": "200GB"}
    )
    demand = Demand(config=config, weights=table)
    found = plan(demand, cluster.machines, cluster.links, Constraints(experts_in_ram="auto"), explain=False)
    (stage,) = found.stages
    cost = CostModel(config, named_device(device), weights=table)
    rows: list[Row] = []
    for count in RAM_ROWS:
        work = decode_work(count, read_tokens=demand.read_tokens)
        costs = [cost.with_ram_percent(percent).slice_cost(stage.part) for percent in range(101)]
        larger_s = [max(memory_times(each, work)) for each in costs]
        even = min(range(101), key=larger_s.__getitem__)
        for label, percent in (("chosen", stage.machine.room.ram_percent), ("most even", even)):
            step_s, least_s = costs[percent].step_s(work), larger_s[percent]
            name = f"arithmetic: {model} on {device}, {percent} % in RAM ({label}), {counted(count, 'row')}"
            rows.append(at_most(name, 1e3 * step_s, "ms", 1e3 * least_s, "larger memory time", 1.3))
            share = costs[percent].ram_experts / costs[percent].num_experts
            turns_s = in_turns_s(costs[0], costs[100], share, work)
            rows.append(
                Row("  beside whole layers in RAM", 1e3 * step_s, "ms", 1e3 * turns_s, "in turns", step_s / turns_s)
            )
    return rows


def in_turns_s(none: SliceCost, every: SliceCost, share: float, work: StepWork) -> float:
    """Return the seconds of a step if ``share`` of the layers had all experts in RAM: the places take turns."""
    moved_s = every.ram_s(work) + every.crossing_s - none.expert_read_s * none.distinct_share(work.tokens)
    return none.step_s(work) + share * moved_s


def memory_times(cost: SliceCost, work: StepWork) -> tuple[float, float]:
    """Return the seconds to read what a step needs of the device's memory, and of the RAM's."""
    share = cost.distinct_share(work.tokens)
    kv_s = sum(attention.kv_token_s * attention.seen(work).kv_tokens for attention in cost.attention)
    return cost.read_s + cost.expert_read_s * share + cost.head_read_s + kv_s, cost.ram_read_s * share


def planned_rows(stage: Stage, config: ModelConfig, table: WeightTable, threads: int, rounds: int) -> list[Row]:
    """Compare the planner's time of steps that it did not measure with their time."""
    backend = TorchBackend(BackendOptions(device="cpu", threads=threads))
    profile = probe_layer(backend, config, SystemClock(), value_bytes=4, weights=table, packing="torch-cpu")
    speed = measured_speed(profile, backend.profile(), config, weights=table, dtype="float32")
    rows: list[Row] = []
    for count in BETWEEN:
        step = stage.step(count)
        measured_s = float(np.median([step() for _ in range(rounds + 1)][1:]))
        parts = speed.parts(StepWork.of_rows([CONTEXT_BLOCKS * BLOCK_TOKENS - 1] * count, [1] * count, logit_rows=0))
        planned_s = parts.base_s + LAYERS * float(parts.layer_s.mean())
        ratio = planned_s / measured_s
        name = f"planned step of {LAYERS} layers, {counted(count, 'row')}, {counted(threads, 'thread')}"
        met = 0.9 <= ratio <= 1.1
        rows.append(Row(name, 1e3 * planned_s, "ms", 1e3 * measured_s, "measured", ratio, "within 10%", met))
    return rows


PARTS: dict[str, Part] = {
    "logits": logits_rows,
    "truth": emulated_rows,
    "layers": steps_rows,
    "planned": prediction_rows,
    "ram": ram_rows,
}


if __name__ == "__main__":
    run_parts("experts", PARTS)
