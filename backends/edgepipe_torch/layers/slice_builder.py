"""Empty storage for a slice's weights, with the destination of each tensor.

Merged and tiled storage is allocated first and filled in place, so no weight is held twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgepipe.errors import ModelInvalid
from edgepipe.model.expert_places import numbers_in_ram
from edgepipe.model.facts import ModelConfig, Slice
from edgepipe.model.layer_spec import Activation, Attention, DeltaNet, Experts, LayerSpec, Mamba2, ShortConv
from edgepipe.model.layout import EMBEDDING, FINAL_NORM, HEAD, LAYER_SCALE, OWN_NORMS, norm_names
from edgepipe.model.packed import Packed
from edgepipe.model.tensors import WeightInfo
from edgepipe_torch.cpu.experts import CpuExperts
from edgepipe_torch.cpu.kernels import CpuKernels, cpu_kernels
from edgepipe_torch.cpu.packed import PackedCpuLinear, multiplies_floats
from edgepipe_torch.cpu.packed_weight import tile_floats
from edgepipe_torch.cpu.repack import StoredBlocks
from edgepipe_torch.cpu.shard_cache import ShardCache
from edgepipe_torch.layers.compiled_code import KernelsUnavailable
from edgepipe_torch.layers.decoder import Layer, SliceWeights
from edgepipe_torch.layers.expert_filling import Taken, each_bias, each_expert, matrix_bias_sink, matrix_sink
from edgepipe_torch.layers.expert_ram import CPU, ExpertsInRam
from edgepipe_torch.layers.expert_uses import ExpertUses
from edgepipe_torch.layers.feed_forward import (
    Apart,
    Both,
    CountsExperts,
    EachExpert,
    ExpertProducts,
    FeedForward,
    Gated,
    Mixture,
    RouterWeights,
)
from edgepipe_torch.layers.host_weights import (
    HostWeight,
    Sink,
    StoredWeight,
    copy_exactly,
    exact_type,
    floats_of,
    shape_of,
)
from edgepipe_torch.layers.latent import LatentWeights
from edgepipe_torch.layers.linear import (
    HalfLinear,
    Linear,
    PackedLinear,
    PlainLinear,
    Table,
    TiledLinear,
    Workspace,
    half_works,
)
from edgepipe_torch.layers.measuring import lacks_memory
from edgepipe_torch.layers.recurrent import Convolution, DeltaNetMixer, Mamba2Mixer, Mixer, ShortConvMixer
from edgepipe_torch.layers.rope import RotaryKind

if TYPE_CHECKING:
    from edgepipe_torch.cuda.experts import ExpertMatrix
    from edgepipe_torch.cuda.kernels.library import ExpertLibrary

_EXPERTS = "experts"  # role of their products


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where products compute."""

    device: torch.device
    dtype: torch.dtype
    workspace: Workspace


class SliceBuilder:
    """Empty storage for a slice, with the destination of each named tensor."""

    def __init__(
        self,
        config: ModelConfig,
        part: Slice,
        infos: Sequence[WeightInfo],
        *,
        dtype: torch.dtype,
        device: torch.device,
        workspace: Workspace,
        rotations: Mapping[RotaryKind, int],
        packed: bool = True,
        kernels: CpuKernels | KernelsUnavailable | None = None,
        cache: ShardCache | None = None,
        ram_percent: int = 0,
        uses: ExpertUses | None = None,
    ) -> None:
        """``infos``: the weights to load. ``packed``: those with a form stay packed. ``kernels``: of a CPU, None for
        this process's. ``cache``: of repacked weights. ``ram_percent``: of each layer's experts, which stay in host
        memory. ``uses``: of experts before. Raises ArchitectureUnsupported.
        """
        self._config = config
        self._dtype = dtype
        self._device = device
        self._rotations = rotations
        self._kernels = kernels
        self._cache = cache
        self._place = _Place(device=device, dtype=dtype, workspace=workspace)
        self._ram = _Place(device=CPU, dtype=torch.float32, workspace=Workspace(torch.float32, CPU))
        self._ram_percent = ram_percent
        self._uses = uses or ExpertUses(None)
        self._packed = packed and (device.type == "cuda" or dtype == torch.float32)
        self._infos = {info.name: info for info in infos}
        self._sinks: dict[str, list[Sink]] = {}
        self._unfinished: list[tuple[set[str], Linear]] = []  # missing names, product
        self._mixtures: list[tuple[CountsExperts, int]] = []
        layers = [self._layer(index) for index in part.layers]
        head = self._head() if part.head else None
        self.weights = SliceWeights(
            part=part,
            layers=layers,
            embedding=self._embedding(head) if part.embedding else None,
            final_norm=self._vector(FINAL_NORM, config.hidden_size) if part.head else None,
            head=head,
            mixtures=self._mixtures,
        )

    def take(self, name: str, tensor: HostWeight) -> None:
        """Copy a host tensor or a packed weight to its destination. ``takes_stored``: or read it from its files.

        Raises ModelInvalid for an unknown name or a wrong shape, and torch's memory errors.
        """
        if name not in self._sinks:
            raise ModelInvalid(f"tensor '{name}' does not belong to the slice")
        try:
            for sink in self._sinks[name]:
                sink(tensor)
        except RuntimeError as exc:
            if lacks_memory(exc) or "CUDA error" in str(exc):  # the device's fault, not the tensor's
                raise
            raise ModelInvalid(
                f"tensor '{name}' does not fit the config", fact=f"its shape is {list(shape_of(tensor))}"
            ) from exc
        self._finish(name)

    def release(self) -> None:
        """Forget the destinations. They refer to the builder, so the weights would stay until Python collects it."""
        self._sinks.clear()
        self._unfinished.clear()

    @property
    def packed(self) -> bool:
        """Whether weights with a form stay packed."""
        return self._packed

    @property
    def takes_stored(self) -> bool:
        """Whether ``take`` reads weights with a form itself."""
        return self._packed and self._device.type == "cpu"

    def _finish(self, name: str) -> None:
        """Finish the products for which this was the last tensor, before the next tensor is read."""
        for missing, linear in self._unfinished:
            missing.discard(name)
            if not missing:
                linear.finish()
        self._unfinished = [entry for entry in self._unfinished if entry[0]]

    def _layer(self, index: int) -> Layer:
        spec, prefix = self._config.layers[index], f"model.layers.{index}."
        attention, hidden = spec.attention, self._config.hidden_size
        before, after = (
            [self._vector(f"{prefix}{name}.weight", hidden) for name in names] for names in norm_names(spec)
        )
        input_norm, inner_norm = [*(() if spec.mixes else (None,)), *before, None, None][:2]
        feed_forward = self._feed_forward(spec, prefix + "mlp.") if spec.feeds else None
        if spec.own_norms:
            assert isinstance(feed_forward, Both)
            assert inner_norm is not None
            norms = (self._vector(f"{prefix}{name}.weight", hidden) for name in OWN_NORMS)
            feed_forward, inner_norm = Apart(feed_forward, (inner_norm, *norms), self._config.norm.eps), None
        attended_norm, added_norm = [*after, None, None][:2]
        mixer, output = self._mixer(spec, prefix)
        layer = Layer(
            spec=spec,
            input_norm=input_norm,
            mixer=mixer,
            output=output,
            attended_norm=attended_norm,
            inner_norm=inner_norm,
            feed_forward=feed_forward,
            added_norm=added_norm,
            output_scale=self._matrix(prefix + LAYER_SCALE, (1,), self._dtype) if spec.output_scaled else None,
        )
        if attention is not None:
            self._attend(layer, attention, prefix + "self_attn.")
        return layer

    def _attend(self, layer: Layer, attention: Attention, prefix: str) -> None:
        """Make a layer's attention."""
        if attention.latent is not None:
            layer.latent = self._latent(prefix, attention)
        layer.qkv = self._qkv(prefix, attention)
        layer.output = self._linear([(prefix + "o_proj", self._config.hidden_size, None)], attention.output_width)
        layer.query_norm = self._qk_norm(prefix + "q_norm.weight", attention.query_width, attention)
        layer.key_norm = self._qk_norm(prefix + "k_norm.weight", attention.kv_width, attention)
        if attention.rope:
            layer.rotation = self._rotations.get((attention.rope, attention.rotated))
        if attention.temperature:
            layer.temperature = self._rotations.get(attention.temperature)
        if attention.value_norm:
            layer.value_norm = self._ones(attention.head_dim)
        if attention.values_from_keys:
            layer.value_order = pair_order(attention.head_dim, attention).argsort().to(self._device)
        if attention.sinks:
            layer.sinks = self._matrix(prefix + "sinks", (attention.num_heads,), torch.float32)

    def _mixer(self, spec: LayerSpec, prefix: str) -> tuple[Mixer | None, Linear | None]:
        """Make a recurrent layer's mixer and its output product; neither without one."""
        match spec.recurrent:
            case DeltaNet() as delta:
                return self._delta_net(delta, prefix + "linear_attn.")
            case Mamba2() as mamba:
                return self._mamba2(mamba, prefix + "mamba.")
            case ShortConv() as conv:
                name, hidden = prefix + "conv.", self._config.hidden_size
                product = self._linear([(name + "in_proj", 3 * conv.channels, None)], hidden)
                mixer = ShortConvMixer(conv, product, self._convolution(name + "conv", conv.channels, conv.taps))
                return mixer, self._linear([(name + "out_proj", hidden, None)], conv.channels)
            case None:
                return None, None

    def _delta_net(self, spec: DeltaNet, prefix: str) -> tuple[Mixer, Linear]:
        hidden, values = self._config.hidden_size, spec.value_heads * spec.value_dim
        sizes = {"qkv": spec.channels, "z": values, "b": spec.value_heads, "a": spec.value_heads}
        product = self._linear([(f"{prefix}in_proj_{name}", size, None) for name, size in sizes.items()], hidden)
        convolution = self._convolution(prefix + "conv1d", spec.channels, spec.taps)
        mixer = DeltaNetMixer(spec, product, convolution, eps=self._config.norm.eps, device=self._device)
        self._exact(prefix + "dt_bias", mixer.dt_bias)
        self._exact(prefix + "A_log", mixer.rates, torch.exp)
        self._exact(prefix + "norm.weight", mixer.norm)
        return mixer, self._linear([(prefix + "out_proj", hidden, None)], values)

    def _mamba2(self, spec: Mamba2, prefix: str) -> tuple[Mixer, Linear]:
        hidden, inner = self._config.hidden_size, spec.heads * spec.head_dim
        product = self._linear([(prefix + "in_proj", inner + spec.channels + spec.heads, None)], hidden)
        convolution = self._convolution(prefix + "conv1d", spec.channels, spec.taps)
        mixer = Mamba2Mixer(spec, product, convolution, eps=self._config.norm.eps, device=self._device)
        self._exact(prefix + "dt_bias", mixer.dt_bias)
        self._exact(prefix + "A_log", mixer.rates, torch.exp)
        self._exact(prefix + "D", mixer.skips)
        self._exact(prefix + "norm.weight", mixer.norm)
        return mixer, self._linear([(prefix + "out_proj", hidden, None)], inner)

    def _convolution(self, name: str, channels: int, taps: int) -> Convolution:
        weight = self._matrix(name + ".weight", (channels, taps), torch.float32)
        biased = name + ".bias" in self._infos
        return Convolution(weight, self._matrix(name + ".bias", (channels,), torch.float32) if biased else None)

    def _exact(self, name: str, target: Tensor, change: Callable[[Tensor], Tensor] | None = None) -> None:
        """Fill a float32 tensor with a weight, or with what ``change`` makes of it."""

        def sink(weight: HostWeight) -> None:
            values = floats_of(weight).float()
            copy_exactly(target, values if change is None else change(values))

        self._send(name, sink)

    def _qkv(self, prefix: str, attention: Attention) -> Linear:
        """Make the input product of a layer's attention."""
        query, key, hidden = attention.query_width, attention.kv_width, self._config.hidden_size
        if attention.latent is None:
            asked = query * (1 + attention.gated)
            own = [(f"{prefix}q_proj", asked, attention), (f"{prefix}k_proj", key, attention)]
            values = [] if attention.values_from_keys else [(f"{prefix}v_proj", key, None)]
            return self._linear([*own, *values], hidden)
        latent = attention.latent
        plain = attention.num_heads * (latent.nope_dim + latent.rope_dim)
        asked = ("q_a_proj", latent.query_rank) if latent.query_rank else ("q_proj", plain)
        parts = [asked, ("kv_a_proj_with_mqa", key)]
        return self._linear([(f"{prefix}{name}", size, None) for name, size in parts], hidden)

    def _latent(self, prefix: str, attention: Attention) -> LatentWeights:
        latent = attention.latent
        assert latent is not None
        width = attention.num_heads * (latent.nope_dim + latent.rope_dim)
        query = self._linear([(f"{prefix}q_b_proj", width, None)], latent.query_rank) if latent.query_rank else None
        made = LatentWeights(attention, query, dtype=self._dtype, device=self._device)
        if latent.query_rank:
            self._send(f"{prefix}q_a_layernorm.weight", lambda weight: copy_exactly(made.query_norm, floats_of(weight)))
        self._send(f"{prefix}kv_a_layernorm.weight", lambda weight: copy_exactly(made.key_norm, floats_of(weight)))
        if latent.joined:
            self._send(f"{prefix}kv_b_proj.weight", lambda weight: made.fill_joined(floats_of(weight)))
        else:
            self._send(f"{prefix}k_b_proj.weight", lambda weight: made.fill_keys(floats_of(weight)))
            self._send(f"{prefix}v_b_proj.weight", lambda weight: made.fill_values(floats_of(weight)))
        return made

    def _qk_norm(self, name: str, width: int, attention: Attention) -> Tensor | None:
        if not attention.qk_norm:
            return None
        return self._vector(name, attention.head_dim if attention.qk_norm == "head" else width, pairs=attention)

    def _feed_forward(self, spec: LayerSpec, prefix: str) -> FeedForward:
        own = spec.dense
        dense = None if own is None else self._gated(prefix, own.inner, own.activation, gated=own.gated)
        if spec.experts is None:
            assert dense is not None  # a layer has a feed-forward part
            return dense
        mixture = self._mixture(spec.experts, prefix)
        return mixture if dense is None else Both(dense, mixture)

    def _gated(self, prefix: str, inner: int, activation: Activation, *, gated: bool = True) -> Gated:
        hidden = self._config.hidden_size
        parts = [(prefix + name, inner, None) for name in (("gate_proj", "up_proj") if gated else ("up_proj",))]
        gate_up = self._linear(parts, hidden)
        return Gated(gate_up, self._linear([(prefix + "down_proj", hidden, None)], inner), activation)

    def _mixture(self, experts: Experts, prefix: str) -> Mixture:
        hidden, how = self._config.hidden_size, experts.router
        router = RouterWeights(
            *self._router_product(prefix + "router", experts.count, biased=how.bias),
            self._matrix(prefix + "router.correction", (experts.count,), torch.float32) if how.correction else None,
            None if how.input_eps is None else self._matrix(prefix + "router.input_scale", (hidden,), torch.float32),
            self._matrix(prefix + "router.expert_scale", (experts.count,), torch.float32)
            if how.expert_scales
            else None,
        )
        if how.groups == 1 and (library := self._expert_library()):
            router.choose = library.routing().choose
        shared: Gated | None = None
        if experts.shared_inner:
            activation = "silu" if experts.gated else experts.activation
            shared = self._gated(prefix + "shared_expert.", experts.shared_inner, activation, gated=experts.gated)
        gated = experts.shared_inner and experts.shared_gated
        gate = self._matrix(prefix + "shared_expert_gate.weight", (1, hidden), self._dtype) if gated else None
        own, in_ram = self._placed_experts(experts, prefix + "experts.")
        if (counting := in_ram or own) is not None:
            self._mixtures.append((counting, experts.count))
        return Mixture(experts, router, own, shared, gate, self._around_experts(experts, prefix), in_ram)

    def _router_product(self, name: str, count: int, *, biased: bool) -> tuple[Tensor | Linear, Tensor | None]:
        """Make the router's weight [E, H] and bias [E], or the product of kernels that has both.

        The kernels give a row the same logits whichever rows are beside it, so that it always has the same experts.
        """
        shape = count, self._config.hidden_size
        kernels = self._kernels or cpu_kernels() if self._place.device.type == "cpu" else None
        if self._place.dtype != torch.float32 or shape[1] % 8 or not multiplies_floats(kernels):
            weight = self._matrix(name + ".weight", shape, torch.float32)
            return weight, self._matrix(name + ".bias", (count,), torch.float32) if biased else None
        linear = PackedCpuLinear("router", shape[1], (count,), self._place.workspace, kernels)

        def fill(weight: HostWeight) -> None:
            if shape_of(weight) != shape:
                raise RuntimeError("another shape is needed")  # take() turns it into ModelInvalid
            linear.fill_repacked(0, tile_floats(floats_of(weight), torch.float32))

        self._send(name + ".weight", fill)
        if biased:
            self._send(name + ".bias", self._bias_sink(linear, 0, count, pairs=None))
        names = {name + ".weight"} | ({name + ".bias"} if biased else set())
        self._unfinished.append((names, linear))
        return linear, None

    def _around_experts(self, experts: Experts, prefix: str) -> tuple[Linear, Linear] | None:
        """Make the products before and after experts that have a width of their own."""
        hidden, width = self._config.hidden_size, experts.latent
        if not width:
            return None
        before = self._linear([(f"{prefix}latent_in", width, None)], hidden)
        return before, self._linear([(f"{prefix}latent_out", hidden, None)], width)

    def _placed_experts(self, experts: Experts, prefix: str) -> tuple[ExpertProducts | None, ExpertsInRam | None]:
        """Make the experts on the device and those in host memory."""
        layer, count = int(prefix.split(".")[2]), experts.count
        beside = numbers_in_ram(count, self._ram_percent, self._uses.kept(layer, count))
        own = sorted({*range(count)} - {*beside})
        on_device = self._device_experts(experts, prefix, own) if own else None
        if not beside:
            return on_device, None
        in_ram = self._experts_by_name(experts, prefix, self._ram, beside)
        return on_device, ExpertsInRam(in_ram, beside, self._uses.counter(layer, count), device=self._device)

    def _device_experts(self, experts: Experts, prefix: str, numbers: Sequence[int]) -> ExpertProducts:
        if experts.gated and (library := self._expert_library()):
            return self._cuda_experts(experts, prefix, library, numbers)
        return self._experts_by_name(experts, prefix, self._place, numbers)

    def _expert_library(self) -> ExpertLibrary | None:
        if self._device.type != "cuda":
            return None
        from edgepipe_torch.cuda.experts import expert_library

        return expert_library(self._device, self._dtype)

    def _experts_by_name(self, experts: Experts, prefix: str, place: _Place, numbers: Sequence[int]) -> ExpertProducts:
        width = experts.latent or self._config.hidden_size
        names = ("gate_proj", "up_proj") if experts.gated else ("up_proj",)
        gate_up = self._expert_linears(prefix, names, Taken(numbers, experts.inner, experts.count), width, place)
        down = self._expert_linears(prefix, ("down_proj",), Taken(numbers, width, experts.count), experts.inner, place)
        each = EachExpert([Gated(one, other, experts.activation) for one, other in zip(gate_up, down, strict=True)])
        if experts.gated and all(isinstance(linear, PackedCpuLinear) for linear in each.linears):
            return CpuExperts(each, experts.activation, place.workspace, elsewhere=len(numbers) < experts.count)
        return each

    def _cuda_experts(
        self, experts: Experts, prefix: str, library: ExpertLibrary, numbers: Sequence[int]
    ) -> ExpertProducts:
        from edgepipe_torch.cuda.experts import CudaExperts, ExpertMatrix

        def matrix(names: Sequence[str], rows: int, in_features: int) -> ExpertMatrix:
            infos = [self._infos.get(f"{prefix}{name}.weight") for name in names]
            forms = [info.form if info is not None and self._packed else None for info in infos]
            made = ExpertMatrix(
                len(numbers), in_features, len(names), rows, forms, device=self._device, library=library
            )
            taken = Taken(numbers, rows, experts.count)
            for part, name in enumerate(names):
                self._send(f"{prefix}{name}.weight", matrix_sink(made, part, taken, in_features))
                self._send(f"{prefix}{name}.bias", matrix_bias_sink(made, part, taken))
            return made

        width = experts.latent or self._config.hidden_size
        gate_up = matrix(("gate_proj", "up_proj"), experts.inner, width)
        return CudaExperts(gate_up, matrix(("down_proj",), width, experts.inner), experts.activation, library)

    def _expert_linears(
        self, prefix: str, matrices: Sequence[str], taken: Taken, in_features: int, place: _Place
    ) -> list[Linear]:
        """Make one product for each expert taken, of parts that hold each expert's rows in turn."""
        weights = [f"{prefix}{matrix}.weight" for matrix in matrices]
        biases = [f"{prefix}{matrix}.bias" for matrix in matrices]
        names = {name for name in (*weights, *biases) if name in self._infos}
        sizes = [taken.rows] * len(matrices)
        linears = [self._new_linear(_EXPERTS, in_features, sizes, weights, place) for _ in taken.numbers]
        for part, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            self._send(weight, each_expert(linears, part, taken, in_features))
            if bias in names:
                self._send(bias, each_bias(linears, part, taken))
        self._unfinished += [(set(names), linear) for linear in linears]
        return linears

    def _head(self) -> Linear:
        name = EMBEDDING if self._config.tied_embeddings else HEAD
        return self._merged("head", [(name, "", self._config.vocab_size, None)], self._config.hidden_size)

    def _embedding(self, head: Linear | None) -> Tensor | Table:
        if self._config.tied_embeddings and isinstance(head, TiledLinear | PlainLinear | PackedLinear):
            return head
        info = self._infos.get(EMBEDDING)
        if self._packed and info is not None and info.form is not None:
            table = self._merged(
                "embedding", [(EMBEDDING, "", self._config.vocab_size, None)], self._config.hidden_size
            )
            assert isinstance(table, PackedLinear)
            return table
        dtype = self._dtype
        if dtype == torch.float32 and info is not None:  # the decoder widens rows
            dtype = exact_type(info)
        rows = torch.empty(self._config.vocab_size, self._config.hidden_size, dtype=dtype, device=self._device)
        self._send(EMBEDDING, lambda tensor: copy_exactly(rows, floats_of(tensor)))
        return rows

    def _linear(self, parts: Sequence[tuple[str, int, Attention | None]], in_features: int) -> Linear:
        """Make a product from parts: name without suffix, out features, attention whose rotary pairs its rows form."""
        named = [(f"{name}.weight", f"{name}.bias", size, pairs) for name, size, pairs in parts]
        return self._merged(parts[0][0].rsplit(".", 1)[1], named, in_features)

    def _merged(self, role: str, parts: Sequence[tuple[str, str, int, Attention | None]], in_features: int) -> Linear:
        names = {name for weight, bias, _size, _pairs in parts for name in (weight, bias) if name in self._infos}
        sizes = [size for _weight, _bias, size, _pairs in parts]
        linear = self._new_linear(role, in_features, sizes, [weight for weight, _bias, _size, _pairs in parts])
        for index, (weight, bias, size, pairs) in enumerate(parts):
            self._send(weight, self._part_sink(linear, index, (size, in_features), pairs=pairs))
            self._send(bias, self._bias_sink(linear, index, size, pairs=pairs))
        self._unfinished.append((names, linear))
        return linear

    def _new_linear(
        self,
        role: str,
        in_features: int,
        sizes: Sequence[int],
        weights: Sequence[str],
        place: _Place | None = None,
    ) -> Linear:
        """Choose the class. ``weights``: of the parts, in order."""
        place = place or self._place
        forms = [self._infos[name].form if name in self._infos else None for name in weights]
        if self._packed and any(forms):
            if place.device.type == "cpu":
                tiled = role == _EXPERTS
                return PackedCpuLinear(role, in_features, sizes, place.workspace, self._kernels, tiled_floats=tiled)
            from edgepipe_torch.cuda.packed import PackedCudaLinear

            return PackedCudaLinear(in_features, sizes, forms, dtype=place.dtype, device=place.device)
        if place.device.type != "cpu" or place.dtype != torch.float32:
            return PlainLinear(in_features, sizes, dtype=place.dtype, device=place.device)
        if role == _EXPERTS and in_features % 8 == 0:
            kernels = self._kernels or cpu_kernels()
            if isinstance(kernels, CpuKernels):
                return PackedCpuLinear(role, in_features, sizes, place.workspace, kernels, tiled_floats=True)
        exact = all(self._infos[name].fits_16_bits for name in weights if name in self._infos)  # biases are float32
        kind = HalfLinear if exact and half_works() else TiledLinear
        return kind(role, in_features, sizes, place.workspace)

    def _part_sink(self, linear: Linear, index: int, shape: tuple[int, int], *, pairs: Attention | None) -> Sink:
        def sink(weight: HostWeight) -> None:
            if shape_of(weight) != shape:
                raise RuntimeError("another shape is needed")  # take() turns it into ModelInvalid
            order = None if pairs is None else pair_order(shape[0], pairs)
            if isinstance(weight, StoredBlocks | StoredWeight):
                assert isinstance(linear, PackedCpuLinear)
                self._fill_stored(linear, index, weight, None if order is None else order.numpy())
            elif isinstance(weight, Packed):
                assert isinstance(linear, PackedLinear)
                linear.fill_packed(index, weight if order is None else weight.rows(order.numpy()))
            else:
                linear.fill(index, weight if order is None else weight[order])

        return sink

    def _fill_stored(
        self,
        linear: PackedCpuLinear,
        index: int,
        weight: StoredBlocks | StoredWeight,
        order: npt.NDArray[np.int64] | None,
    ) -> None:
        """Fill a part from the cache; else repack it and keep it there."""
        kept = self._cache.read(weight.info, order) if self._cache else None
        if kept is not None:
            linear.fill_repacked(index, kept)
            return
        if isinstance(weight, StoredBlocks):
            linear.fill_blocks(index, weight, order)
        else:
            packed = weight.load()
            linear.fill_packed(index, packed if order is None else packed.rows(order))
        if self._cache:
            self._cache.keep(weight.info, order, linear.repacked(index))

    def _bias_sink(self, linear: Linear, index: int, size: int, *, pairs: Attention | None) -> Sink:
        def sink(bias: HostWeight) -> None:
            if shape_of(bias) != (size,):
                raise RuntimeError("another shape is needed")  # take() turns it into ModelInvalid
            values = floats_of(bias)
            linear.fill_bias(index, values if pairs is None else values[pair_order(size, pairs)])

        return sink

    def _vector(self, name: str, size: int, *, pairs: Attention | None = None) -> Tensor:
        """Make a norm's weight; the files of some families hold it minus one."""
        vector = torch.empty(size, dtype=self._dtype, device=self._device)
        order = slice(None) if pairs is None else pair_order(size, pairs)
        more = 1.0 if self._config.norm.plus_one else 0.0
        self._send(name, lambda tensor: copy_exactly(vector, (floats_of(tensor)[order].float() + more)))
        return vector

    def _ones(self, size: int) -> Tensor:
        return torch.ones(size, dtype=self._dtype, device=self._device)

    def _matrix(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        matrix = torch.empty(shape, dtype=dtype, device=self._device)
        self._send(name, lambda tensor: copy_exactly(matrix, floats_of(tensor)))
        return matrix

    def _send(self, name: str, sink: Sink) -> None:
        self._sinks.setdefault(name, []).append(sink)


def pair_order(rows: int, attention: Attention) -> Tensor:
    """Return the order of q's or k's rows in which rotary pairs are adjacent.

    Files have rotating rows of a head as (half, pair), unless the family interleaves them; the rest of a head stays.
    Rows of gated attention's queries, of which each head's are followed by its gates: all gates come first.
    """
    if attention.gated and rows == 2 * attention.query_width:
        parts = torch.arange(rows).view(attention.num_heads, 2, -1)
        queries = parts[:, 0].reshape(-1)[pair_order(attention.query_width, attention)]
        return torch.cat([parts[:, 1].reshape(-1), queries])
    rotated, size = attention.rotated, attention.head_dim
    own = torch.arange(size)
    if rotated and not attention.interleaved:
        own[:rotated] = torch.arange(rotated).view(2, -1).t().reshape(-1)
    return (torch.arange(rows // size)[:, None] * size + own).reshape(-1)
