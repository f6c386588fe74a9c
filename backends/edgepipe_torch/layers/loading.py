"""Read weights into a slice, one at a time: the builder says where each goes; it is freed before the next is read.

Weights with a form stay packed, or are widened to the compute dtype.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from edgepipe.backend.types import LoadProgress
from edgepipe.errors import ModelInvalid
from edgepipe.spec.facts import Slice
from edgepipe.spec.tensors import WeightSource
from edgepipe.weights.stored_weight import StoredWeight, stored_weights
from edgepipe_torch.layers.decoder import SliceWeights
from edgepipe_torch.layers.device import Device
from edgepipe_torch.layers.expert_uses import ExpertUses
from edgepipe_torch.layers.measuring import lacks_memory
from edgepipe_torch.layers.rope import RotaryKind
from edgepipe_torch.layers.slice_builder import SliceBuilder


def load_slices(
    slices: Sequence[Slice],
    source: WeightSource,
    progress: Callable[[LoadProgress], None],
    *,
    device: Device,
    host: Device,
    rotations: Mapping[RotaryKind, int],
    ram_percent: int = 0,
    uses: ExpertUses | None = None,
) -> list[SliceWeights]:
    """Read every slice's weights.

    device       that computes the slices
    host         that computes experts in host memory
    rotations    place of each kind of rotary embedding among those of a step
    ram_percent  of each layer's experts, which stay in host memory (``edgepipe.spec.expert_places``)
    uses         of experts before, which decide which experts these are; counts them from now on

    Raises ModelInvalid, ArchitectureUnsupported, and torch's memory errors.
    """
    sizes = [info.num_bytes for part in slices for info in source.weights(part)]
    done_bytes = 0
    loaded: list[SliceWeights] = []
    for part in slices:
        opened = stored_weights(source, part)
        weights = deque(opened if device.packed else (weight.without_form() for weight in opened))
        infos = [weight.info for weight in weights]
        builder = SliceBuilder(
            source.config,
            part,
            infos,
            device=device,
            host=host,
            rotations=rotations,
            ram_percent=ram_percent,
            uses=uses,
        )
        try:
            for info in infos:
                _fill(builder, weights.popleft())
                done_bytes += info.num_bytes
                progress(LoadProgress(bytes_done=done_bytes, bytes_total=sum(sizes)))
        finally:
            builder.release()
        loaded.append(builder.weights)
    return loaded


def _fill(builder: SliceBuilder, weight: StoredWeight) -> None:
    """Read a weight to its places. Raises ModelInvalid for an unknown name or a wrong shape, and memory errors."""
    name, shape = weight.info.name, weight.info.shape
    for place in builder.places(name):
        if shape != place.shape:
            raise _misfit(name, shape)
        try:
            place.fill(weight)
        except RuntimeError as exc:
            if lacks_memory(exc) or "CUDA error" in str(exc):  # the device's fault, not the weight's
                raise
            raise _misfit(name, shape) from exc
    builder.finish(name)


def _misfit(name: str, shape: tuple[int, ...]) -> ModelInvalid:
    return ModelInvalid(f"tensor '{name}' does not fit the config", fact=f"its shape is {list(shape)}")
