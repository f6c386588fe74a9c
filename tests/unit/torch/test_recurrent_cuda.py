"""One token of recurrent layers by the CUDA kernels' own source, run on a CPU: values, slots, forms, broken kernels."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from edgepipe_torch import TorchBackend  # noqa: E402
from edgepipe_torch.cuda.kernels.driver import SHARED_BYTES  # noqa: E402
from edgepipe_torch.cuda.kernels.forms import kernel_source, options  # noqa: E402
from edgepipe_torch.cuda.kernels.recurrent_checking import (  # noqa: E402
    NUM_SLOTS,
    random_mixer,
    step_error,
    worst_step_error,
)
from edgepipe_torch.cuda.kernels.recurrent_step import MixerStep, StepForm, step_form  # noqa: E402
from edgepipe_torch.layers.compiled_code import KernelsUnavailable  # noqa: E402

from edgepipe.backend.types import BackendOptions, RowState, StateWrite, StepRow  # noqa: E402
from edgepipe.spec.facts import LayerRange, make_slices  # noqa: E402
from edgepipe.spec.layer_spec import DeltaNet, Mamba2, Recurrent, ShortConv  # noqa: E402
from edgepipe.testing.tiny_model import TinyWeights  # noqa: E402
from tests.support.backends.host_compiler import COMPILER  # noqa: E402
from tests.support.backends.host_kernels import SOURCES, HostModule, Part, compile_for_host  # noqa: E402
from tests.support.backends.nvrtc import nvrtc_for  # noqa: E402
from tests.support.backends.recorded_steps import QWEN, STEP_FORMS, recorded_steps  # noqa: E402
from tests.support.backends.steps import make_step, run_step, step_row  # noqa: E402
from tests.support.backends.torch_paging import CudaOnHost  # noqa: E402
from tests.support.models.recurrent_layers import CONV, DELTA, MAMBA, MODELS  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

    from edgepipe_torch.layers.recurrent import Mixer, StepKernel

CPU = torch.device("cpu")
BF16 = torch.bfloat16
NEMOTRON = Mamba2(heads=64, head_dim=64, groups=8, state_dim=128, taps=4)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")

Modules = dict[StepForm, HostModule]


class TestValues:
    @pytest.mark.parametrize("name", STEP_FORMS)
    def test_the_check_at_load_passes(self, name: str, step_modules: Modules) -> None:
        form = STEP_FORMS[name]
        assert worst_step_error(MixerStep(step_modules[form], form), form, CPU) <= 1

    @settings(max_examples=30, deadline=None)
    @given(
        name=st.sampled_from(sorted({*STEP_FORMS} - {"Qwen3.6"})),
        groups=st.integers(1, 3),
        shared=st.integers(1, 3),
        tiled=st.booleans(),
        moves=st.lists(st.tuples(st.integers(0, NUM_SLOTS - 1), st.booleans()), min_size=1, max_size=NUM_SLOTS - 1),
        large=st.booleans(),
        seed=st.integers(0, 2**32 - 1),
    )
    def test_of_any_rows(
        self,
        step_modules: Modules,
        name: str,
        groups: int,
        shared: int,
        tiled: bool,
        moves: list[tuple[int, bool]],
        large: bool,
        seed: int,
    ) -> None:
        """Rows stay in their slot or go to one that no other row reads or writes; several may read one slot."""
        places: list[tuple[int, int]] = []
        read = {slot for slot, _ in moves}
        free = [slot for slot in range(NUM_SLOTS) if slot not in read]
        alone = {slot for slot in read if sum(other == slot for other, _ in moves) == 1}
        for slot, stays in moves:
            if stays and slot in alone:
                places.append((slot, slot))
            elif free:
                places.append((slot, free.pop()))
        if not places:
            return
        form = STEP_FORMS[name]
        spec = spec_of(form, groups, shared, tiled)
        kernels = MixerStep(step_modules[form], form)
        assert step_error(kernels, form, spec, CPU, places=places, large=large, seed=seed) <= 1

    def test_a_row_does_not_depend_on_its_neighbours(self, step_modules: Modules) -> None:
        for name, spec in (("delta", DELTA), ("mamba", MAMBA), ("conv", CONV)):
            form = STEP_FORMS[name]
            mixer = random_mixer(spec, torch.Generator().manual_seed(1), CPU)
            kernel = MixerStep(step_modules[form], form).of(mixer)
            made = torch.randn(3, 900, generator=torch.Generator().manual_seed(2)).bfloat16()
            states = tuple(torch.randn(4, *shape) for shape in spec.state_shapes)
            found: list[list[Any]] = []
            for others in (1.0, torch.nan):
                rows, kept = made * torch.tensor([[others], [1.0], [others]]).bfloat16(), [*map(torch.clone, states)]
                slots = torch.tensor([0, 3, 2])
                found.append([kernel.run(rows, tuple(kept), slots, slots, threads=1)[1], *(each[3] for each in kept)])
            assert all(torch.equal(tensor, other) for tensor, other in zip(*found, strict=True))

    def test_rows_of_the_other_type_and_scattered_slots_are_refused(self, step_modules: Modules) -> None:
        kernel = MixerStep(step_modules[STEP_FORMS["conv"]], STEP_FORMS["conv"]).of(
            random_mixer(CONV, torch.Generator(), CPU)
        )
        made, slots, states = torch.zeros(2, 48).bfloat16(), torch.arange(4), (torch.zeros(4, 2, 16),)
        for rows, read, own in (
            (made.float(), slots[:2], states),
            (made, slots[::2], states),
            (made, slots[:2].int(), states),
            (made, slots[:2], (torch.zeros(4, 2, 17),)),
            (made, slots[:2], (torch.zeros(4, 16, 2).mT,)),
        ):
            with pytest.raises(AssertionError):
                kernel.run(rows, own, read, read, threads=1)


def spec_of(form: StepForm, groups: int, shared: int, tiled: bool) -> Recurrent:
    heads = groups * shared
    match form.kind:
        case "gate":
            return ShortConv(channels=5 * heads, taps=form.taps)
        case "mamba":
            limits = (0.1, 0.3) if tiled else (0.0, np.inf)
            sizes = {"head_dim": form.rows, "state_dim": form.columns, "taps": form.taps, "dt_limits": limits}
            return Mamba2(heads=heads, groups=groups, **sizes)
        case "delta":
            sizes = {"key_dim": form.rows, "value_dim": form.columns, "taps": form.taps}
            return DeltaNet(key_heads=groups, value_heads=heads, tiled=tiled, **sizes)


@pytest.mark.parametrize("name", MODELS)
def test_a_backend_computes_by_the_cuda_source(name: str, step_modules: Modules) -> None:
    """In bf16, of prompts and single tokens beside one another, as torch's operations do."""
    config, used, recorded = MODELS[name], Counter[int](), recorded_steps(step_modules)

    def counted(mixer: Mixer, dtype: Any) -> StepKernel:
        kernel = recorded(mixer, dtype)
        run, number = kernel.run, len(used)
        used[number] = 0

        def counting(*given: Any, **named: Any) -> Any:
            used[number] += 1
            return run(*given, **named)

        kernel.run = counting
        return kernel

    options = BackendOptions(device="cpu", dtype="bfloat16", threads=1)
    backends = [
        TorchBackend(options, device=CudaOnHost("bfloat16", step_kernels=counted)),
        TorchBackend(options),
    ]
    for backend in backends:
        backend.load(make_slices([LayerRange(0, config.num_layers)], config.num_layers), TinyWeights(config), print)
        backend.allocate_kv(num_blocks=8, block_size=16, state_slots=6)
    draw, lengths = np.random.default_rng(3), [0, 0, 0]
    for counts in ((4, 1, 7), (1, 1, 1), (1, 3, 1), (1, 1, 1), (1, 1, 1)):
        rows: list[StepRow] = []
        for at, count in enumerate(counts):
            before, after = (at + 3 * (lengths[at] % 2), at + 3 * ((lengths[at] + count) % 2))
            state = RowState(before if lengths[at] else None, (StateWrite(count, after),))
            rows.append(replace(step_row(lengths[at], count, (2 * at, 2), sequence=at + 1), state=state))
            lengths[at] += count
        ids = draw.integers(0, 31, sum(counts)).astype(np.int32)
        found, plain = (run_step(backend, make_step(rows), ids) for backend in backends)
        np.testing.assert_allclose(found, plain, rtol=0, atol=0.02 * float(np.abs(plain).max()))
    assert set(used.values()) == {5}


class TestForms:
    @pytest.mark.parametrize(
        ("spec", "reason"),
        [
            (replace(QWEN, key_dim=12), "not 12 by 128"),
            (replace(QWEN, value_dim=48), "not 128 by 48"),
            (replace(QWEN, value_dim=256), "16384 at most, not 128 by 256"),
            (replace(QWEN, key_dim=8, value_dim=2048), "not 8 by 2048"),
            (replace(NEMOTRON, state_dim=16), "not 64 by 16"),
            (replace(CONV, taps=1), "two taps"),
        ],
    )
    def test_others_are_refused_by_name(self, spec: Recurrent, reason: str) -> None:
        with pytest.raises(KernelsUnavailable, match=reason):
            step_form(spec, BF16)
        with pytest.raises(KernelsUnavailable, match="float16"):
            step_form(CONV, torch.float16)

    def test_launches_fit_shared_memory(self) -> None:
        for rows, columns in ((128, 128), (16, 1024), (512, 32)):
            spec = DeltaNet(key_heads=1, value_heads=1, key_dim=rows, value_dim=columns, taps=4)
            noted = Launches()
            kernel = MixerStep(noted, step_form(spec, BF16)).of(random_mixer(spec, torch.Generator(), CPU))
            states = tuple(torch.zeros(1, *shape) for shape in spec.state_shapes)
            made = torch.zeros(1, spec.channels + columns + 2).bfloat16()
            kernel.run(made, states, torch.zeros(1).long(), torch.zeros(1).long(), threads=1)
            assert noted.functions == ["convolve_step", "delta_step"]


class Launches:
    """A module that only notes what it is asked to launch."""

    def __init__(self) -> None:
        self.functions: list[str] = []

    def launch(self, function: str, *, blocks: int, shared_bytes: int, arguments: Any) -> None:
        assert blocks > 0
        assert shared_bytes <= SHARED_BYTES
        self.functions.append(function)


MUTANTS = {
    "delta": (
        ("by.tiled ? head % by.groups : head / (by.heads / by.groups)", "head / (by.heads / by.groups)"),
        ("memory[depth][column] *= decay;", ""),
        ("lane * COLUMNS, found);\n    synchronise();\n    float error", "lane * COLUMNS, found);\n    float error"),
    ),
    "mamba": (
        ("step < by.low ? by.low : step > by.high ? by.high : step", "step"),
        ("= squares;\n    synchronise();", "= squares;"),
    ),
    "conv": (("own[by.channels]", "own[0]"),),
}


@needs_compiler
def test_the_check_at_load_refuses_broken_kernels(tmp_path: Path) -> None:
    """Sources with one change each; a missing barrier shows, since blocks run their warps in either order."""
    folder = tmp_path / "sources"
    folder.mkdir()
    parts: list[Part] = []
    made: list[tuple[StepForm, str]] = []
    for name, changes in MUTANTS.items():
        form = STEP_FORMS[name]
        *shared, own = form.files
        source = (SOURCES / own).read_text(encoding="utf-8")
        for each in shared:
            shutil.copy(SOURCES / each, folder)
        for index, (whole, broken) in enumerate(changes):
            assert whole in source, whole
            (folder / f"{name}_{index}.cu").write_text(source.replace(whole, broken, 1), encoding="utf-8")
            parts.append(Part(files=(*shared, f"{name}_{index}.cu"), macros=form.macros, functions=form.functions))
            made.append((form, whole))
    found = zip(made, compile_for_host(parts, tmp_path, folder), strict=True)
    assert [whole for (form, whole), module in found if _error(module, form) <= 1] == []


def _error(module: HostModule, form: StepForm) -> float:
    try:
        return worst_step_error(MixerStep(module, form), form, CPU)
    except RuntimeError:  # threads diverge
        return np.inf


@pytest.mark.parametrize(("architecture", "spec"), [(80, QWEN), (90, NEMOTRON), (120, CONV)], ids=str)
def test_compile_without_a_gpu(architecture: int, spec: Recurrent) -> None:
    nvrtc = nvrtc_for(architecture)
    form = step_form(spec, BF16)
    cubin = nvrtc.compile(kernel_source(form.files), architecture=architecture, options=options(form.macros))
    assert cubin.startswith(b"\x7fELF")
    assert all(re.search(function.encode(), cubin) for function in form.functions)
