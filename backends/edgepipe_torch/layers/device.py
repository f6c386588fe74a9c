"""What a kind of device computes with: products, experts, attention, recurrent steps, recorded steps.

``edgepipe_torch.devices`` chooses one. Common code asks this protocol and never tests for a kind.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt
import torch

from edgepipe.backend.types import DeviceProfile, KernelError, SlowPath
from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.kv_forms import LARGEST_BLOCK
from edgepipe.spec.layer_spec import Experts, Router
from edgepipe.weights.repacked import RepackedPlace
from edgepipe.weights.stored_weight import Rows, StoredWeight
from edgepipe_torch.layers.attention import StepAttention
from edgepipe_torch.layers.decoder import Decoder, SliceWeights
from edgepipe_torch.layers.experts import ExpertProducts, each_expert
from edgepipe_torch.layers.host_copies import HostMover, Mover
from edgepipe_torch.layers.linear import Linear, PartForms, ReadWeight, Workspace, floats_of
from edgepipe_torch.layers.packed_kv import Storage
from edgepipe_torch.layers.prepared import PreparedStep, Replayed
from edgepipe_torch.layers.recurrent import Mixer
from edgepipe_torch.layers.routing import AddGated, Choose, add_gated, choose
from edgepipe_torch.layers.slice_ends import SliceEnds
from edgepipe_torch.layers.states import StatePool
from edgepipe_torch.layers.step_ops import StepOps
from edgepipe_torch.layers.transfer import Transfer

PAGE_TOKENS = LARGEST_BLOCK  # tokens of a page in attention over pages


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatedSlice:
    """A loaded slice with its pools."""

    weights: SliceWeights
    decoder: Decoder
    ends: SliceEnds
    pool: Storage
    states: StatePool | None  # states of a slice with recurrent layers
    block_size: int


class SliceSteps(Protocol):
    """How a device computes the steps of one slice."""

    counted_rows: Collection[int] | None  # numbers of rows that recorded steps compute without surplus rows; None: any

    def attention(self, prepared: PreparedStep) -> StepAttention:
        """Return the attention of a step, in the layers of one memory class."""
        ...

    def replay(self, prepared: PreparedStep, inputs: npt.NDArray[Any]) -> Replayed | None:
        """Compute a step by a recorded one; None if no recorded step fits.

        inputs  [T] int32 token ids, or [T, H] activations in the link's type
        """
        ...


class Device(Protocol):
    """A CPU or a GPU. Devices inherit what they do not do themselves."""

    place: torch.device
    dtype: torch.dtype  # type that layers compute in
    packed: bool  # weights with a form stay packed
    packing: str  # see ``DeviceProfile.packing``
    own_memory: bool  # apart from the host's, which may then hold experts
    norms_stay: bool = False  # ``StepOps.norm`` returns a new tensor, which no later work overwrites
    picks_candidates: bool  # answer where the setting ``sampling`` is auto
    block_sizes: tuple[int, ...]
    transfer: Transfer
    mover: Mover = HostMover()
    workspace: Workspace  # a new one after ``release``

    def profile(self) -> DeviceProfile:
        """Return memory as reported, and measured bandwidth and matrix rate."""
        ...

    def kernel_errors(self) -> Iterator[KernelError]:
        """Compare the device's own kernels with float64. See ``CheckingBackend``."""
        ...

    def free_bytes(self) -> int:
        """Return the available memory, with what torch's cache there gives back."""
        ...

    def start_load(self, kept: RepackedPlace | None) -> None:
        """Prepare this thread and the cache of repacked weights. ``kept``: its place beside a model of the store."""

    def begin_step(self) -> None:
        """Prepare this thread for the next step."""

    def end_step(self) -> None:
        """Record that a step was submitted; on a CPU, it is computed then."""

    def product(self, role: str, in_features: int, sizes: Sequence[int], parts: PartForms) -> Linear:
        """Make an empty product of parts with these out features.

        ``role``: names the layer's product, which shares buffers with those of other layers.
        """
        ...

    def read(self, weight: StoredWeight, rows: Rows | None = None) -> ReadWeight:
        """Read rows of a weight [O, I], or all, in the form that products here take. Raises ModelInvalid."""
        if weight.info.form is not None:
            return weight.packed_rows(rows)
        floats = floats_of(weight)
        return floats if rows is None else floats[rows if isinstance(rows, slice) else torch.from_numpy(rows)]

    def router(self, in_features: int, count: int) -> Linear | None:
        """Make the product of a router, whose rows have the same logits in any batch; None: there are no kernels."""
        return None

    def choice(self, how: Router) -> Choose:
        """Return what chooses experts by their logits."""
        return choose

    def gated_sum(self) -> AddGated:
        """Return what adds the result of a shared expert with a gate."""
        return add_gated

    def experts(
        self, spec: Experts, in_features: int, count: int, gate_up: PartForms, down: PartForms
    ) -> ExpertProducts:
        """Make ``count`` empty experts of a mixture."""
        return each_expert(self.product, spec, in_features, count, gate_up, down)

    def compile_steps(self, config: ModelConfig, mixers: Iterable[Mixer], *, has_packed: bool) -> StepOps:
        """Compile what computes between products; give each mixer its kernel. ``has_packed``: some weights are packed.

        The weights are loaded.
        """
        ...

    def finish_load(self) -> None:
        """Begin to keep what was repacked."""

    def slow_paths(self, weights: Sequence[SliceWeights], block_size: int) -> Iterator[SlowPath]:
        """Yield what makes steps of loaded slices slow, with KV blocks of a size. May take seconds."""
        return iter(())

    def pads_steps(self, block_size: int) -> bool:
        """Return whether recorded steps have surplus rows, which need a spare block and a spare slot of states."""
        return False

    def slice_steps(self, allocated: AllocatedSlice) -> SliceSteps:
        """Return what computes a slice's steps. Checking kernels may take seconds."""
        ...

    def wait_until_kept(self, timeout_s: float) -> None:
        """Wait until the repacked weights are on disk. Raises TimeoutError."""

    def release(self) -> None:
        """Forget buffers and what belongs to a load; return cached memory."""
        ...
