"""Threads of steps on a CPU, while other programs take some of its processors."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from edgepipe_torch import TorchBackend  # noqa: E402
from edgepipe_torch.cpu.device import CpuDevice  # noqa: E402
from edgepipe_torch.cpu.kernels import KernelsUnavailable, cpu_kernels  # noqa: E402

from edgepipe.backend.free_cores import CoreTimes, ThreadChoice  # noqa: E402
from edgepipe.backend.types import ActivationType, BackendOptions  # noqa: E402
from edgepipe.testing.tiny_model import tiny_config  # noqa: E402
from tests.support.backends.maker import cut  # noqa: E402
from tests.support.backends.steps import make_step, run_step, step_row, token_ids  # noqa: E402
from tests.support.models.packed import PackedTinyModel  # noqa: E402

CORES, STEPS = 3, 12
CONFIG = tiny_config(num_layers=2, hidden_size=256, num_heads=8, num_kv_heads=2, head_dim=32, vocab_size=304)

pytestmark = pytest.mark.skipif(isinstance(cpu_kernels(), KernelsUnavailable), reason="no kernels for this CPU")


@pytest.fixture(autouse=True)
def threads_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("edgepipe.backend.free_cores._PAUSE_S", float("inf"))  # a slow machine is no pause
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Others:
    """Other programs, which use so many cores; each reading is as late as the next one is due."""

    def __init__(self) -> None:
        self.cores = 0.0
        self._now = CoreTimes(-1e9, 0.0, 0.0)  # long before the clock that says when a reading is due

    def __call__(self) -> CoreTimes:
        at_s, busy_s, own_s = self._now
        self._now = CoreTimes(at_s + 0.5, busy_s + 0.5 * (self.cores + 1), own_s + 0.5)
        return self._now


def backend(others: Others | None, *, forms: dict[str, str]) -> TorchBackend:
    torch.set_num_threads(CORES)
    choice = ThreadChoice(CORES, cores=CORES) if others is not None else None
    device = CpuDevice(torch.float32, threads=choice, read_times=others or Others())
    options = BackendOptions(device="cpu", activation_type=ActivationType.FLOAT32, threads=CORES)
    made = TorchBackend(options, device=device)
    made.load(cut(CONFIG, ()), PackedTinyModel(CONFIG, forms), lambda _progress: None)
    made.allocate_kv(num_blocks=16, block_size=4)
    return made


def steps(made: TorchBackend, others: Others | None) -> tuple[list[np.ndarray], list[int]]:
    """Logits and numbers of threads of a prompt and of tokens, while another program comes and goes."""
    tokens = np.random.default_rng(3).integers(0, 290, 60).tolist()
    outputs: list[np.ndarray] = []
    threads: list[int] = []
    position = 0
    for index, count in enumerate((17, *(1,) * STEPS)):
        if others is not None:
            others.cores = 2.0 if 4 <= index < 8 else 0.0
        ids = token_ids(tokens[position : position + count])
        outputs.append(run_step(made, make_step([step_row(position, count, (0, 16))]), ids))
        threads.append(torch.get_num_threads())
        position += count
    return outputs, threads


def test_steps_leave_the_processors_of_others_alone_and_give_the_same_bits() -> None:
    expected, _ = steps(backend(None, forms={"": "Q8_0"}), None)
    others = Others()
    found, threads = steps(backend(others, forms={"": "Q8_0"}), others)
    assert threads == [3] * 4 + [1] * 5 + [3] * 4
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_weights_whose_products_depend_on_the_threads_keep_their_number() -> None:
    others = Others()
    _, threads = steps(backend(others, forms={}), others)
    assert set(threads) == {CORES}
