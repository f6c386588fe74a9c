"""Speeds of devices and links: measured where possible, else from tables. PURE."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgepipe.backend.cost import CostModel, SliceCost, StepWork
from edgepipe.backend.devices import CUDA_LAUNCH_LAYER_S, CUDA_LAUNCH_ROW_S, DeviceModel, kernel_tiles
from edgepipe.backend.expert_reads import ExpertShare, cleaned
from edgepipe.backend.types import DeviceProfile
from edgepipe.errors import LinkNotMeasured
from edgepipe.ids import NodeId
from edgepipe.planner.hosts import HOST_S
from edgepipe.planner.layer_profile import LayerProfile, Point
from edgepipe.planner.placement import NodeRoom
from edgepipe.spec.expert_places import split_kind
from edgepipe.spec.facts import ModelConfig, Slice, whole_slice
from edgepipe.units import LinkShape
from edgepipe.weights.weight_table import FLOATS, WeightTable

Floats = npt.NDArray[np.float64]

MEASURED, ESTIMATED = "measured", "estimated"

# Overheads of an unmeasured device: per step, and per layer.
_GUESSED_OVERHEADS_S = {"cpu": (300e-6, 60e-6), "gpu": (250e-6, 20e-6)}
_CUDA_OVERHEADS_S = (200e-6, 50e-6)  # an H100 with graphs: small kernels do not fill it

_SOME_BYTES_PER_S, _SOME_FLOPS = 100e9, 2e12  # rates of a device that did not report them: only ratios of layers count


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """A step's time on a device, as a sum over layers."""

    base_s: float  # independent of the layers
    layer_s: Floats  # [L] of each layer
    head_s: float  # additional with the head

    def slice_s(self, part: Slice) -> float:
        """Return the time of a step on a slice."""
        layers_s = float(self.layer_s[part.layers.start : part.layers.end].sum())
        return self.base_s + layers_s + (self.head_s if part.head else 0.0)


class Speed(Protocol):
    """A device's speed with one model."""

    @property
    def source(self) -> str:
        """``measured`` or ``estimated``."""
        ...

    @property
    def busy(self) -> bool:
        """Whether other programs used much of the machine during the measurement."""
        ...

    @property
    def measured_s(self) -> float:
        """Time of the measurement, wall clock, since 1970; 0: not measured or not known."""
        ...

    def parts(self, work: StepWork) -> StepParts:
        """Return the times of a step."""
        ...

    def token_s(self, config: ModelConfig, weights: WeightTable, *, context_tokens: int) -> float:
        """Return the time of one token of another model that is whole on the device."""
        ...

    def with_ram_percent(self, percent: int) -> Speed:
        """Return the speed with ``percent`` of each layer's experts in host memory."""
        ...

    def with_expert_shares(self, shares: tuple[ExpertShare, ...]) -> Speed:
        """Return the speed if the model's steps read these shares of a layer's experts; itself if it cannot tell."""
        ...


class TableSpeed:
    """Speed from a device's data sheet; see ``edgepipe.backend.cost``."""

    source = ESTIMATED
    busy, measured_s = False, 0.0

    def __init__(self, cost: CostModel, *, expert_shares: tuple[ExpertShare, ...] = ()) -> None:
        self._cost, self._shares = cost, expert_shares
        self._none, self._headed = (cost.mean_cost(0, head=head) for head in (False, True))
        self._kinds = np.array(cost.kinds)
        self._layers = [replace(each, expert_shares=expert_shares) for each in cost.kind_costs()]

    def with_expert_shares(self, shares: tuple[ExpertShare, ...]) -> TableSpeed:
        """See ``Speed.with_expert_shares``."""
        return TableSpeed(self._cost, expert_shares=shares)

    def with_ram_percent(self, percent: int) -> TableSpeed:
        """See ``Speed.with_ram_percent``."""
        return TableSpeed(self._cost.with_ram_percent(percent), expert_shares=self._shares)

    @property
    def base_s(self) -> float:
        """Seconds of a step without layers, by the data sheet."""
        return self._none.step_s(StepWork.of_rows([0], [1], logit_rows=0))

    def token_s(self, config: ModelConfig, weights: WeightTable, *, context_tokens: int) -> float:
        """See ``Speed.token_s``."""
        whole = self._cost.of_model(config, weights).slice_cost(whole_slice(config))
        return whole.step_s(StepWork.of_rows([context_tokens], [1], logit_rows=1))

    def wait_s(self, work: StepWork) -> Floats:
        """Return the seconds [L] of each layer in which the device waits for the CPU's experts."""
        return np.array([layer.wait_s(work) for layer in self._layers])[self._kinds]

    def parts(self, work: StepWork) -> StepParts:
        """Return the estimated times. See ``Speed.parts``."""
        base_s = self._none.step_s(work)
        layer_s = np.array([layer.step_s(work) - base_s for layer in self._layers])
        return StepParts(base_s=base_s, layer_s=layer_s[self._kinds], head_s=self._headed.step_s(work) - base_s)


class MeasuredSpeed:
    """Speed from a device's own measurements of layers in the model's mix.

    The data sheet only tells how the measured time is shared between kinds of layers, and how the time of layers with
    experts goes on between the measured numbers of rows, where it is not linear.
    """

    source = MEASURED

    def __init__(
        self,
        profile: LayerProfile,
        cost: CostModel,
        *,
        expert_shares: tuple[ExpertShare, ...] | None = None,
        ram_percent: int = 0,
    ) -> None:
        """``cost``: by the device's data sheet. ``expert_shares``: that the model reads; None: as the probe did.

        ``ram_percent``: of each layer's experts, in host memory, unlike in the measurement. The measured time shrinks
        by their part in the data sheet, and the time in which the device waits for them is added.
        """
        self._profile = profile
        self._cost, self._expert_shares, self._ram_percent = cost, expert_shares, ram_percent
        self.busy, self.measured_s = profile.busy, profile.measured_ms / 1e3
        self._probed_shares = cleaned(ExpertShare(point.size, point.expert_share) for point in profile.decode)
        self._probed = TableSpeed(cost, expert_shares=self._probed_shares)
        self._sheet = self._probed if expert_shares is None else self._probed.with_expert_shares(expert_shares)
        self._split = self._sheet.with_ram_percent(ram_percent) if ram_percent else None
        self._kinds = np.array(cost.kinds)
        self._attention = [kind.attention[0] for kind in cost.kind_costs()]
        self._experts = cost.has_experts
        kv_s = np.array([each.kv_token_s for each in self._attention])
        self._kv_token_s = profile.kv_token_s * kv_s / kv_s[self._kinds].mean()

    def with_expert_shares(self, shares: tuple[ExpertShare, ...]) -> MeasuredSpeed:
        """See ``Speed.with_expert_shares``. The times are the probe's if it did not count the experts that it read."""
        if not self._experts or not shares or not self._probed_shares:
            return self
        return MeasuredSpeed(self._profile, self._cost, expert_shares=shares, ram_percent=self._ram_percent)

    def with_ram_percent(self, percent: int) -> MeasuredSpeed:
        """See ``Speed.with_ram_percent``."""
        return MeasuredSpeed(self._profile, self._cost, expert_shares=self._expert_shares, ram_percent=percent)

    def parts(self, work: StepWork) -> StepParts:
        """See ``Speed.parts``. Assumes that prompt tokens beside decodes cost as much as alone in one row."""
        profile = self._profile
        mean_s = self._decode_s(work.rows)
        sheet_s = self._sheet_s(work)
        if work.tokens != work.rows:
            prompt_s = _at((profile.decode[0], *profile.prefill), work.tokens)
            mean_s = max(prompt_s * float(sheet_s.mean() / self._sheet_s(work, self._probed).mean()), mean_s)
        own = self._context_s(work)[self._kinds]
        head_s = _at(profile.head, work.logit_rows) if work.logit_rows else 0.0
        layer_s = mean_s * sheet_s / sheet_s.mean()
        if self._split is not None:
            wait_s = self._split.wait_s(work)
            layer_s = layer_s * (self._sheet_s(work, self._split) - wait_s) / sheet_s + wait_s
        layer_s = layer_s + own
        return StepParts(base_s=profile.base_s, layer_s=layer_s, head_s=head_s)

    def token_s(self, config: ModelConfig, weights: WeightTable, *, context_tokens: int) -> float:
        """See ``Speed.token_s``: layers by the data sheet, in the proportion of the measured ones to the sheet's.

        The time that no layer takes is the measured one. A small model's token is short, so that counts.
        """
        ratio = self._decode_s(1) / self._mean_sheet_s(1, self._probed)
        layers_s = self._probed.token_s(config, weights, context_tokens=context_tokens) - self._probed.base_s
        return self._profile.base_s + ratio * layers_s

    def _decode_s(self, rows: int) -> float:
        """Return the mean layer's time at ``decode_context``."""
        points = self._profile.decode
        if not self._experts:
            return _at(points, rows)
        ratios = [point.seconds / self._mean_sheet_s(point.size, self._probed) for point in points]
        sheet_s = self._mean_sheet_s(rows, self._sheet)
        return sheet_s * float(np.interp(rows, [point.size for point in points], ratios))

    def _mean_sheet_s(self, rows: float, sheet: TableSpeed) -> float:
        count = round(rows)
        return float(self._sheet_s(StepWork.of_rows([0] * count, [1] * count, logit_rows=0), sheet).mean())

    def _sheet_s(self, work: StepWork, sheet: TableSpeed | None = None) -> Floats:
        """Return each layer's time [L] without attention, by the data sheet."""
        return (sheet or self._sheet).parts(work._replace(kv_tokens=0, attention_pairs=0.0)).layer_s

    def _context_s(self, work: StepWork) -> Floats:
        """Return the time [kinds] of attending to tokens beyond ``decode_context``."""
        measured = work.rows * self._profile.decode_context
        beyond = [max(0.0, attention.seen(work).kv_tokens - measured) for attention in self._attention]
        return np.array(beyond) * self._kv_token_s


def _slope(points: Sequence[Point]) -> float:
    first, last = points[0], points[-1]
    return max(0.0, last.seconds - first.seconds) / (last.size - first.size) if last.size > first.size else 0.0


def _at(points: Sequence[Point], size: float) -> float:
    """Interpolate linearly; extrapolate beyond the last point with the last slope, below the first as constant."""
    sizes, seconds = [point.size for point in points], [point.seconds for point in points]
    if size <= sizes[-1] or len(points) == 1:
        return float(np.interp(size, sizes, seconds))
    return seconds[-1] + _slope(points[-2:]) * (size - sizes[-1])


def estimated_speed(
    profile: DeviceProfile, config: ModelConfig, *, weights: WeightTable = FLOATS, dtype: str = "", kv: str = ""
) -> Speed:
    """Estimate the speed of a device without a probe from its memory and matrix rates.

    ``dtype``: empty: the device's own. ``kv``: form of the KV, as for ``CostModel``; empty: the dtype.
    """
    return TableSpeed(_cost_model(profile, config, weights, dtype, kv))


def measured_speed(
    layer: LayerProfile,
    profile: DeviceProfile,
    config: ModelConfig,
    *,
    weights: WeightTable = FLOATS,
    dtype: str = "",
) -> Speed:
    """Return the speed of a device with a probe. ``profile``: its rates, if known; see ``estimated_speed``."""
    if profile.bandwidth_bytes_per_s <= 0 or profile.flops <= 0:
        profile = replace(profile, bandwidth_bytes_per_s=_SOME_BYTES_PER_S, flops=_SOME_FLOPS)
    return MeasuredSpeed(layer, _cost_model(profile, config, weights, dtype))


def slice_costs(
    profile: DeviceProfile, config: ModelConfig, slices: Iterable[Slice], *, weights: WeightTable = FLOATS, kv: str = ""
) -> dict[int, SliceCost]:
    """Return each slice's cost, by slice index, from the device's rates; empty if it reported none.

    ``kv``: form of the KV; empty: the compute dtype.
    """
    if profile.bandwidth_bytes_per_s <= 0 or profile.flops <= 0:
        return {}
    cost = _cost_model(profile, config, weights, kv=kv)
    return {part.index: cost.slice_cost(part) for part in slices}


def _cost_model(
    profile: DeviceProfile, config: ModelConfig, weights: WeightTable, dtype: str = "", kv: str = ""
) -> CostModel:
    dtype = dtype or ("float32" if profile.compute_dtype == "float32" else "bfloat16")
    return CostModel(config, _as_table(profile), weights=weights, kind=profile.packing, dtype=dtype, kv=kv)


def _as_table(profile: DeviceProfile) -> DeviceModel:
    """Build a data-sheet device from a profile, with overheads and tiles by its kind."""
    guessed = _GUESSED_OVERHEADS_S["cpu" if profile.device == "cpu" else "gpu"]
    is_cuda = profile.device.startswith("cuda")
    step_s, layer_s = _CUDA_OVERHEADS_S if is_cuda else guessed
    return DeviceModel(
        name=profile.name,
        memory_bytes=profile.memory_total_bytes,
        bandwidth_bytes_per_s=profile.bandwidth_bytes_per_s,
        flops=profile.flops,
        step_overhead_s=step_s,
        layer_overhead_s=layer_s,
        launch_layer_s=CUDA_LAUNCH_LAYER_S if is_cuda else 0.0,
        launch_row_s=CUDA_LAUNCH_ROW_S if is_cuda else 0.0,
        ram_bytes_per_s=profile.ram_bytes_per_s,
        reads_as=profile.reads_as,
        **kernel_tiles(profile.reads_as or split_kind(profile.packing)[0]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One device that may become a stage."""

    room: NodeRoom
    device: str  # name for people: "RTX 4090"
    speed: Speed
    total_bytes: int = 0  # the device's memory; 0: not known
    taken_bytes: int = 0  # memory used by other programs, as far as known
    obstacle: str = ""  # why other nodes do not reach it: it gets no layers; empty: they do

    @property
    def node_id(self) -> NodeId:
        """Id of its node."""
        return self.room.node_id

    @property
    def name(self) -> str:
        """Name of its node."""
        return self.room.name

    def with_most_slots(self, most_slots: int) -> Machine:
        """Return the machine with a bound on its slots of states, see ``NodeRoom``."""
        return replace(self, room=replace(self.room, most_slots=most_slots))

    def with_ram_percent(self, percent: int) -> Machine:
        """Return the machine with ``percent`` of each layer's experts in host memory; 0: as its node is."""
        if percent in (0, self.room.ram_percent):
            return self
        return replace(self, room=self.room.with_ram_percent(percent), speed=self.speed.with_ram_percent(percent))


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction between two nodes."""

    shape: LinkShape
    measured: bool


_NO_WAY = LinkShape(bytes_per_s=1.0, one_way_s=1e6)  # finite, so that searches can calculate with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Every directed link, measured or assumed. A node's link to itself stands for its host."""

    measured: Mapping[tuple[NodeId, NodeId], LinkShape] = field(default_factory=dict[tuple[NodeId, NodeId], LinkShape])
    assumed: LinkShape | None = None  # shape of unmeasured links; None: no assumption
    assumed_host_s: float = HOST_S  # cost of a small message on an unmeasured host
    broken: frozenset[tuple[NodeId, NodeId]] = frozenset()  # links between nodes that do not reach each other
    unreached: frozenset[tuple[NodeId, NodeId]] = frozenset()  # links over which a stage cannot dial the next

    def between(self, sender: NodeId, receiver: NodeId) -> Link:
        """Return the link from one node to another; extremely slow if it is broken. Raises LinkNotMeasured."""
        if (sender, receiver) in self.broken:
            return Link(shape=_NO_WAY, measured=True)
        shape = self.measured.get((sender, receiver))
        if shape is not None:
            return Link(shape=shape, measured=True)
        if self.assumed is None:
            raise LinkNotMeasured(f"the link from {sender} to {receiver} has not been measured")
        return Link(shape=self.assumed, measured=False)

    def hop(self, sender: NodeId, receiver: NodeId) -> Link:
        """Return the link from a stage to the next one; extremely slow if it cannot carry a hop."""
        if self.carries_hop(sender, receiver):
            return self.between(sender, receiver)
        return Link(shape=_NO_WAY, measured=True)

    def carries_hop(self, sender: NodeId, receiver: NodeId) -> bool:
        """Return whether the receiver's stage may directly follow the sender's.

        A token's id may return even where this is False, since it uses a stream that the engine has opened.
        """
        return (sender, receiver) not in self.broken and (sender, receiver) not in self.unreached

    def host_s(self, node: NodeId) -> float:
        """Return a node's cost of one small message, without the network, as measured by calls to itself."""
        own = self.measured.get((node, node))
        return own.one_way_s if own is not None else self.assumed_host_s

    def home_s(self, sender: NodeId, receiver: NodeId, nodes: Iterable[NodeId]) -> float:
        """Return the one-way seconds for a token's id: direct, or through one of ``nodes`` if that link is broken.

        Raises LinkNotMeasured.
        """
        if sender == receiver:
            return 0.0
        direct_s = self.between(sender, receiver).shape.one_way_s
        if (sender, receiver) not in self.broken:
            return direct_s
        others = [node for node in nodes if node not in (sender, receiver)]
        legs = [(self.between(sender, node), self.between(node, receiver)) for node in others]
        return min((first.shape.one_way_s + second.shape.one_way_s for first, second in legs), default=direct_s)

    def with_shape(self, sender: NodeId, receiver: NodeId, shape: LinkShape) -> Links:
        """Return the links with one of them replaced."""
        return replace(self, measured={**self.measured, (sender, receiver): shape})
