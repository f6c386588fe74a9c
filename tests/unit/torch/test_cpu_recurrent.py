"""Compiled steps of recurrent layers: against the reference in float64, whatever rows and threads are beside a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import pytest

torch = pytest.importorskip("torch")

from edgepipe_torch.cpu.kernels import CpuKernels, cpu_kernels  # noqa: E402
from edgepipe_torch.cpu.recurrent import CompiledStep  # noqa: E402
from edgepipe_torch.cpu.recurrent_code import step_form  # noqa: E402
from edgepipe_torch.layers.compiled_code import KernelsUnavailable  # noqa: E402
from edgepipe_torch.layers.linear import Workspace  # noqa: E402
from edgepipe_torch.layers.recurrent import MixerWeights  # noqa: E402
from torch import Tensor  # noqa: E402

from edgepipe.spec.layer_spec import DeltaNet, Mamba2, Recurrent, ShortConv  # noqa: E402
from tests.support.numerics.recurrent_reference import mixed  # noqa: E402

pytestmark = pytest.mark.skipif(isinstance(cpu_kernels(), KernelsUnavailable), reason="no kernels for this CPU")

Array = npt.NDArray[np.float64]
Shapes = dict[str, tuple[int, ...]]

HIDDEN, EPS, SLOTS = 48, 1e-5, 9
DELTA = DeltaNet(key_heads=2, value_heads=6, key_dim=16, value_dim=24, taps=4)
MAMBA = Mamba2(heads=6, head_dim=16, groups=3, state_dim=24, taps=4)
SPECS: Mapping[str, Recurrent] = {
    "gated DeltaNet": DELTA,
    "as Qwen3.6": DeltaNet(key_heads=2, value_heads=4, key_dim=128, value_dim=128, taps=4, tiled=True),
    "a key head each": DeltaNet(key_heads=3, value_heads=3, key_dim=8, value_dim=8, taps=2),
    "Mamba-2": MAMBA,
    "one group, limits": Mamba2(heads=4, head_dim=8, groups=1, state_dim=16, taps=3, dt_limits=(0.1, 0.9)),
    "without a bias": Mamba2(heads=2, head_dim=8, groups=2, state_dim=8, taps=4, conv_bias=False),
    "short convolution": ShortConv(channels=136, taps=3),
    "short convolution, biased": ShortConv(channels=8, taps=4, bias=True),
}


class Mixer:
    """A recurrent layer with random weights, by the reference and by kernels."""

    def __init__(self, spec: Recurrent) -> None:
        rng = np.random.default_rng(5)
        self.spec = spec
        self.weights = {name: rng.standard_normal(shape) for name, shape in self._shapes().items()}
        for name, value in self.weights.items():
            value *= 0.5 if value.ndim == 1 else value.shape[1] ** -0.5
            value[:] = value.astype(np.float32)
            if name.endswith("A_log"):
                value -= 2.0
        kernels = cpu_kernels()
        assert isinstance(kernels, CpuKernels)
        form = step_form(spec)
        assert form is not None
        workspace = Workspace(torch.float32, torch.device("cpu"))
        self.step = CompiledStep(kernels, kernels.recurrent(form), spec, self._held(), workspace, eps=EPS)
        self.states = tuple(torch.zeros(SLOTS, *shape) for shape in spec.state_shapes)

    def _shapes(self) -> Shapes:
        products: Shapes
        match self.spec:
            case DeltaNet() as spec:
                name, width = "linear_attn", spec.value_heads * spec.value_dim
                sizes = {"qkv": spec.channels, "z": width, "b": spec.value_heads, "a": spec.value_heads}
                heads, norm = spec.value_heads, spec.value_dim
                products = {f"in_proj_{part}.weight": (size, HIDDEN) for part, size in sizes.items()}
            case Mamba2() as spec:
                name, width = "mamba", spec.heads * spec.head_dim
                heads, norm = spec.heads, width
                products = {"in_proj.weight": (width + spec.channels + heads, HIDDEN), "D": (heads,)}
                products |= {"conv1d.bias": (spec.channels,)} if spec.conv_bias else {}
            case ShortConv() as spec:
                shapes: Shapes = {
                    "in_proj.weight": (3 * spec.channels, HIDDEN),
                    "conv.weight": (spec.channels, spec.taps),
                }
                shapes |= {"conv.bias": (spec.channels,)} if spec.bias else {}
                return {f"conv.{part}": shape for part, shape in shapes.items()} | self._output("conv", spec.channels)
        products |= {"conv1d.weight": (spec.channels, spec.taps), "norm.weight": (norm,)}
        products |= {"dt_bias": (heads,), "A_log": (heads,)}
        return {f"{name}.{part}": shape for part, shape in products.items()} | self._output(name, width)

    def _output(self, name: str, width: int) -> Shapes:
        return {f"{name}.out_proj.weight": (HIDDEN, width)}

    def _held(self) -> MixerWeights:
        def held(*names: str, change: Callable[[Array], Array] = lambda value: value) -> Tensor | None:
            found = [value for name, value in self.weights.items() if name.endswith(names)]
            return torch.from_numpy(change(found[0]).astype(np.float32)) if found else None

        taps = held("conv1d.weight", "conv.conv.weight")
        assert taps is not None
        return MixerWeights(
            taps=taps,
            bias=held("conv1d.bias", "conv.conv.bias"),
            steps=held("dt_bias"),
            rates=held("A_log", change=np.exp),
            skips=held(".D"),
            norm=held("norm.weight"),
        )

    def run(self, x: Array, read: list[int], write: list[int], *, threads: int = 1) -> Tensor:
        """Compute a token x [N, H] of some sequences; returns what enters the output product."""
        products = [value for name, value in self.weights.items() if "in_proj" in name]
        made = torch.from_numpy((x @ np.concatenate(products).T).astype(np.float32))
        found = self.step.run(made, self.states, torch.tensor(read), torch.tensor(write), threads=threads)
        return found.clone()

    def added(self, found: Tensor) -> Array:
        """What the layer adds [N, H]."""
        (product,) = (value for name, value in self.weights.items() if "out_proj" in name)
        return found.double().numpy() @ product.T


@pytest.fixture(scope="module", params=SPECS)
def mixer(request: pytest.FixtureRequest) -> Mixer:
    return Mixer(SPECS[request.param])


def test_tokens_one_by_one_give_the_reference_wherever_states_lie(mixer: Mixer) -> None:
    rng = np.random.default_rng(6)
    tokens = rng.standard_normal((3, 40, HIDDEN))
    expected = np.stack([mixed(mixer.spec, mixer.weights, each, eps=EPS) for each in tokens])
    places = [SLOTS - 1] * 3  # of zeros
    for token in range(40):
        free = [slot for slot in range(SLOTS - 1) if slot not in places]
        moved = [free.pop(int(rng.integers(len(free)))) if rng.random() < 0.5 else place for place in places]
        if token == 0:
            moved = [0, 1, 2]
        found = mixer.added(mixer.run(tokens[:, token], places, moved, threads=1 + token % 2))
        np.testing.assert_allclose(found, expected[:, token], rtol=0, atol=2e-5 * float(np.abs(expected).max()))
        places = moved
    assert not any(state[SLOTS - 1].any() for state in mixer.states), "nothing writes to the zeros"


def test_a_row_has_the_same_bits_alone_and_beside_others_that_read_its_snapshot(mixer: Mixer) -> None:
    rng = np.random.default_rng(7)
    x = rng.standard_normal((4, HIDDEN))
    for state in mixer.states:
        state[:-1] = torch.from_numpy(rng.standard_normal(state[:-1].shape))
    snapshot = [state[3].clone() for state in mixer.states]
    beside = mixer.run(x, [3, 3, 0, 3], [1, 2, 0, 4], threads=2)
    kept = [[state[slot].clone() for state in mixer.states] for slot in (1, 2, 4)]
    for row, slot, found in zip((0, 1, 3), (5, 6, 7), kept, strict=True):
        assert torch.equal(mixer.run(x[row : row + 1], [3], [slot]), beside[row : row + 1])
        assert all(torch.equal(state[slot], other) for state, other in zip(mixer.states, found, strict=True))
    assert all(torch.equal(state[3], other) for state, other in zip(mixer.states, snapshot, strict=True))


@pytest.mark.parametrize(
    "spec",
    [
        DeltaNet(key_heads=2, value_heads=4, key_dim=8, value_dim=6, taps=4),
        Mamba2(heads=4, head_dim=12, groups=2, state_dim=8, taps=4),
        ShortConv(channels=12, taps=3),
    ],
)
def test_sizes_that_vectors_do_not_divide_are_torchs(spec: Recurrent) -> None:
    assert step_form(spec) is None
