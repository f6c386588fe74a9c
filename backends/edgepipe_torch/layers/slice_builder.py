"""Empty storage for a slice's weights, with the places of each weight.

Merged storage is allocated first and filled in place, so no weight is held twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from edgepipe.errors import ModelInvalid
from edgepipe.spec.expert_places import numbers_in_ram
from edgepipe.spec.facts import ModelConfig, Slice
from edgepipe.spec.layer_spec import Activation, Attention, DeltaNet, Experts, LayerSpec, Mamba2, ShortConv
from edgepipe.spec.layout import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    LAYER_SCALE,
    MTP_INPUT,
    MTP_NORMS,
    MTP_OUTPUT_NORM,
    OWN_NORMS,
    embeds,
    norm_names,
)
from edgepipe.spec.tensors import WeightInfo
from edgepipe.weights.stored_weight import StoredWeight
from edgepipe_torch.layers.decoder import SliceWeights
from edgepipe_torch.layers.device import Device
from edgepipe_torch.layers.expert_ram import ExpertsInRam
from edgepipe_torch.layers.expert_uses import ExpertUses
from edgepipe_torch.layers.experts import CountsExperts, ExpertMatrix, ExpertProducts, Taken
from edgepipe_torch.layers.feed_forward import FeedForward, Gated
from edgepipe_torch.layers.head_shape import LayerHeads, layer_heads
from edgepipe_torch.layers.latent import LatentAttention
from edgepipe_torch.layers.layer import Layer
from edgepipe_torch.layers.linear import Linear, PartForms, Table, floats_of
from edgepipe_torch.layers.mixers import LayerMixer, RecurrentMixer, SelfAttention
from edgepipe_torch.layers.mixture import Apart, Both, Mixture
from edgepipe_torch.layers.mtp import MtpLayer
from edgepipe_torch.layers.recurrent import Convolution, DeltaNetMixer, Mamba2Mixer, Mixer, ShortConvMixer
from edgepipe_torch.layers.rope import RotaryKind
from edgepipe_torch.layers.routing import RouterWeights
from edgepipe_torch.layers.step_ops import norm_of


@dataclass(frozen=True, slots=True)
class Place:
    """Where a weight goes."""

    shape: tuple[int, ...]  # the weight's
    fill: Callable[[StoredWeight], None]  # reads it in the form that is needed here; raises RuntimeError


class SliceBuilder:
    """Empty storage for a slice, with the places of each named weight."""

    def __init__(
        self,
        config: ModelConfig,
        part: Slice,
        infos: Sequence[WeightInfo],
        *,
        device: Device,
        host: Device,
        rotations: Mapping[RotaryKind, int],
        ram_percent: int = 0,
        uses: ExpertUses | None = None,
    ) -> None:
        """
        infos        the weights to load; those with a form stay packed
        device       that computes them
        host         where some experts stay
        ram_percent  of each layer's experts, which stay there
        uses         of experts before

        Raises ArchitectureUnsupported.
        """
        self._config = config
        self._norm = norm_of(config.norm)
        self._device, self._host = device, host
        self._dtype, self._place = device.dtype, device.place
        self._rotations = rotations
        self._ram_percent = ram_percent
        self._uses = uses or ExpertUses(None)
        self._infos = {info.name: info for info in infos}
        self._places: dict[str, list[Place]] = {}
        self._unfinished: list[tuple[set[str], Linear | ExpertMatrix]] = []  # missing names, product
        self._mixtures: list[tuple[CountsExperts, int]] = []
        attending = [index for index in part.layers if config.layers[index].attention is not None]
        attentions = [self._attention(index) for index in attending]
        heads = layer_heads(attentions, [self._sinks_of(index) for index in attending])
        self._heads = dict(zip(attending, heads, strict=True))
        self._recurrent = [index for index in part.layers if config.layers[index].recurrent is not None]
        layers = [self._layer(index) for index in part.layers]
        mtp = self._mtp(part.layers.end - 1, layers.pop()) if layers[-1].spec.mtp else None
        head = self._head() if part.head else None
        self.weights = SliceWeights(
            part=part,
            layers=layers,
            heads=heads,
            embedding=self._embedding(head) if embeds(config, part) else None,
            final_norm=self._vector(FINAL_NORM, config.hidden_size) if part.head else None,
            head=head,
            mixtures=self._mixtures,
            mtp=mtp,
        )

    def places(self, name: str) -> Sequence[Place]:
        """Return where a weight goes. Raises ModelInvalid for a weight of another slice."""
        if name not in self._places:
            raise ModelInvalid(f"tensor '{name}' does not belong to the slice")
        return self._places[name]

    def release(self) -> None:
        """Forget the places. They refer to the builder, so the weights would stay until Python collects it."""
        self._places.clear()
        self._unfinished.clear()

    def finish(self, name: str) -> None:
        """Finish the products for which this was the last weight, before the next one is read."""
        for missing, linear in self._unfinished:
            missing.discard(name)
            if not missing:
                linear.finish()
        self._unfinished = [entry for entry in self._unfinished if entry[0]]

    def _layer(self, index: int) -> Layer:
        spec, prefix = self._config.layers[index], f"model.layers.{index}."
        hidden = self._config.hidden_size
        before, after = (
            [self._vector(f"{prefix}{name}.weight", hidden) for name in names] for names in norm_names(spec)
        )
        input_norm, inner_norm = [*(() if spec.mixes else (None,)), *before, None, None][:2]
        feed_forward = self._feed_forward(spec, prefix + "mlp.") if spec.feeds else None
        if spec.own_norms:
            assert isinstance(feed_forward, Both)
            assert inner_norm is not None
            norms = (self._vector(f"{prefix}{name}.weight", hidden) for name in OWN_NORMS)
            feed_forward, inner_norm = Apart(feed_forward, (inner_norm, *norms), self._norm), None
        attended_norm, added_norm = [*after, None, None][:2]
        return Layer(
            spec=spec,
            input_norm=input_norm,
            mixer=self._mixer(index, prefix),
            attended_norm=attended_norm,
            inner_norm=inner_norm,
            feed_forward=feed_forward,
            added_norm=added_norm,
            output_scale=self._matrix(prefix + LAYER_SCALE, (1,), self._dtype) if spec.output_scaled else None,
        )

    def _mtp(self, index: int, layer: Layer) -> MtpLayer:
        """Make what a layer that predicts one token more has besides."""
        prefix, hidden = f"model.layers.{index}.", self._config.hidden_size
        token_norm, output_norm, last_norm = (
            self._vector(prefix + name, hidden) for name in (*MTP_NORMS, MTP_OUTPUT_NORM)
        )
        product = self._linear([(prefix + MTP_INPUT.removesuffix(".weight"), hidden, None)], 2 * hidden)
        return MtpLayer(
            layer=layer, token_norm=token_norm, output_norm=output_norm, product=product, last_norm=last_norm
        )

    def _mixer(self, index: int, prefix: str) -> LayerMixer | None:
        spec = self._config.layers[index]
        if (attention := spec.attention) is not None:
            make = self._self_attention if attention.latent is None else self._latent_attention
            return make(prefix + "self_attn.", attention, self._heads[index])
        match spec.recurrent:
            case DeltaNet() as delta:
                cell, output = self._delta_net(delta, prefix + "linear_attn.")
            case Mamba2() as mamba:
                cell, output = self._mamba2(mamba, prefix + "mamba.")
            case ShortConv() as conv:
                cell, output = self._short_conv(conv, prefix + "conv.")
            case None:
                return None
        return RecurrentMixer(cell=cell, output=output, place=self._recurrent.index(index))

    def _self_attention(self, prefix: str, attention: Attention, heads: LayerHeads) -> SelfAttention:
        size, from_keys = attention.head_dim, attention.values_from_keys
        key, hidden = attention.kv_width, self._config.hidden_size
        asked = attention.query_width * (1 + attention.gated)
        parts = [(f"{prefix}q_proj", asked, attention), (f"{prefix}k_proj", key, attention)]
        return SelfAttention(
            heads=heads,
            gated=attention.gated,
            qkv=self._linear(parts if from_keys else [*parts, (f"{prefix}v_proj", key, None)], hidden),
            output=self._linear([(prefix + "o_proj", hidden, None)], attention.output_width),
            query_norm=self._qk_norm(prefix + "q_norm.weight", attention.query_width, attention),
            key_norm=self._qk_norm(prefix + "k_norm.weight", key, attention),
            value_norm=torch.ones(size, dtype=self._dtype, device=self._place) if attention.value_norm else None,
            value_order=pair_order(size, attention).argsort().to(self._place) if from_keys else None,
            rotation=self._rotations.get((attention.rope, attention.rotated)),
            temperature=self._rotations.get(attention.temperature) if attention.temperature else None,
        )

    def _attention(self, index: int) -> Attention:
        found = self._config.layers[index].attention
        assert found is not None
        return found

    def _sinks_of(self, index: int) -> Tensor | None:
        attention = self._attention(index)
        name = f"model.layers.{index}.self_attn.sinks"
        return self._matrix(name, (attention.num_heads,), torch.float32) if attention.sinks else None

    def _delta_net(self, spec: DeltaNet, prefix: str) -> tuple[Mixer, Linear]:
        hidden, values = self._config.hidden_size, spec.value_heads * spec.value_dim
        sizes = {"qkv": spec.channels, "z": values, "b": spec.value_heads, "a": spec.value_heads}
        product = self._linear([(f"{prefix}in_proj_{name}", size, None) for name, size in sizes.items()], hidden)
        convolution = self._convolution(prefix + "conv1d", spec.channels, spec.taps)
        mixer = DeltaNetMixer(spec, product, convolution, eps=self._config.norm.eps, device=self._place)
        self._exact(prefix + "dt_bias", mixer.dt_bias)
        self._exact(prefix + "A_log", mixer.rates, torch.exp)
        self._exact(prefix + "norm.weight", mixer.norm)
        return mixer, self._linear([(prefix + "out_proj", hidden, None)], values)

    def _short_conv(self, spec: ShortConv, prefix: str) -> tuple[Mixer, Linear]:
        hidden = self._config.hidden_size
        product = self._linear([(prefix + "in_proj", 3 * spec.channels, None)], hidden)
        cell = ShortConvMixer(spec, product, self._convolution(prefix + "conv", spec.channels, spec.taps))
        return cell, self._linear([(prefix + "out_proj", hidden, None)], spec.channels)

    def _mamba2(self, spec: Mamba2, prefix: str) -> tuple[Mixer, Linear]:
        hidden, inner = self._config.hidden_size, spec.heads * spec.head_dim
        product = self._linear([(prefix + "in_proj", inner + spec.channels + spec.heads, None)], hidden)
        convolution = self._convolution(prefix + "conv1d", spec.channels, spec.taps)
        mixer = Mamba2Mixer(spec, product, convolution, eps=self._config.norm.eps, device=self._place)
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

        def fill(values: Tensor) -> None:
            target.copy_(values if change is None else change(values.float()))

        self._send(name, tuple(target.shape), fill)

    def _latent_attention(self, prefix: str, attention: Attention, heads: LayerHeads) -> LatentAttention:
        latent, hidden = attention.latent, self._config.hidden_size
        assert latent is not None
        width = attention.num_heads * (latent.nope_dim + latent.rope_dim)
        asked = ("q_a_proj", latent.query_rank) if latent.query_rank else ("q_proj", width)
        parts = [asked, ("kv_a_proj_with_mqa", attention.kv_width)]
        made = LatentAttention(
            attention,
            heads,
            self._linear([(f"{prefix}{name}", size, None) for name, size in parts], hidden),
            self._linear([(f"{prefix}q_b_proj", width, None)], latent.query_rank) if latent.query_rank else None,
            self._linear([(prefix + "o_proj", hidden, None)], attention.output_width),
            rotation=self._rotations[attention.rope, attention.rotated],
            temperature=self._rotations.get(attention.temperature) if attention.temperature else None,
            dtype=self._dtype,
            device=self._place,
        )
        if latent.query_rank:
            self._send(f"{prefix}q_a_layernorm.weight", (latent.query_rank,), made.query_norm.copy_)
        self._send(f"{prefix}kv_a_layernorm.weight", (latent.kv_rank,), made.key_norm.copy_)
        count, rank = attention.num_heads, latent.kv_rank
        if latent.joined:
            joined = count * (latent.nope_dim + latent.value_dim), rank
            self._send(f"{prefix}kv_b_proj.weight", joined, made.fill_joined)
        else:
            self._send(f"{prefix}k_b_proj.weight", (count * rank, latent.nope_dim), made.fill_keys)
            self._send(f"{prefix}v_b_proj.weight", (count * latent.value_dim, rank), made.fill_values)
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
        router.choose = self._device.choice(how)
        shared: Gated | None = None
        if experts.shared_inner:
            activation = "silu" if experts.gated else experts.activation
            shared = self._gated(prefix + "shared_expert.", experts.shared_inner, activation, gated=experts.gated)
        gated = experts.shared_inner and experts.shared_gated
        gate = self._matrix(prefix + "shared_expert_gate.weight", (1, hidden), self._dtype) if gated else None
        own, in_ram = self._placed_experts(experts, prefix + "experts.")
        if (counting := in_ram or own) is not None:
            self._mixtures.append((counting, experts.count))
        return Mixture(
            experts,
            router,
            own,
            shared,
            gate,
            self._around_experts(experts, prefix),
            in_ram,
            add_gated=self._device.gated_sum(),
            input_stays=self._device.norms_stay,
        )

    def _router_product(self, name: str, count: int, *, biased: bool) -> tuple[Tensor | Linear, Tensor | None]:
        """Make the router's weight [E, H] and bias [E], or the product of kernels that has both.

        The kernels give a row the same logits whichever rows are beside it, so that it always has the same experts.
        """
        shape = count, self._config.hidden_size
        linear = self._device.router(self._config.hidden_size, count)
        if linear is None:
            weight = self._matrix(name + ".weight", shape, torch.float32)
            return weight, self._matrix(name + ".bias", (count,), torch.float32) if biased else None

        self._send(name + ".weight", shape, partial(linear.fill, 0))
        if biased:
            self._send(name + ".bias", (count,), partial(linear.fill_bias, 0))
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
        on_device = self._experts(experts, prefix, self._device, own) if own else None
        if not beside:
            return on_device, None
        in_ram = self._experts(experts, prefix, self._host, beside)
        uses, transfer = self._uses.counter(layer, count), self._device.transfer
        return on_device, ExpertsInRam(in_ram, beside, uses, transfer=transfer, device=self._place)

    def _experts(self, experts: Experts, prefix: str, device: Device, numbers: Sequence[int]) -> ExpertProducts:
        """Make the experts ``numbers`` of a layer on a device."""
        width, entering = experts.latent or self._config.hidden_size, ("gate_proj", "up_proj")
        parts = [prefix + name for name in (entering if experts.gated else entering[1:])], [prefix + "down_proj"]
        forms = [self._forms([f"{part}.weight" for part in each]) for each in parts]
        made = device.experts(experts, width, len(numbers), *forms)
        sizes = (experts.inner, width), (width, experts.inner)
        for matrix, each, (rows, in_features) in zip(made.matrices, parts, sizes, strict=True):
            self._fill_experts(matrix, device, each, Taken(numbers, rows, experts.count), in_features)
        return made

    def _fill_experts(
        self, matrix: ExpertMatrix, device: Device, parts: Sequence[str], taken: Taken, in_features: int
    ) -> None:
        """Fill a matrix on a device from parts that hold all experts' rows in turn."""

        def fill(part: int, weight: StoredWeight) -> None:
            matrix.fill_taken(part, partial(device.read, weight), taken)

        def fill_bias(part: int, bias: Tensor) -> None:
            matrix.fill_taken_bias(part, bias, taken)

        for part, name in enumerate(parts):
            self._take(f"{name}.weight", (taken.all_rows, in_features), partial(fill, part))
            self._send(f"{name}.bias", (taken.all_rows,), partial(fill_bias, part))
        names = {f"{name}{suffix}" for name in parts for suffix in (".weight", ".bias")}
        self._unfinished.append((names & self._infos.keys(), matrix))

    def _head(self) -> Linear:
        name = EMBEDDING if self._config.tied_embeddings else HEAD
        return self._merged("head", [(name, "", self._config.vocab_size, None)], self._config.hidden_size)

    def _embedding(self, head: Linear | None) -> Tensor | Table:
        if self._config.tied_embeddings and isinstance(head, Table):
            return head
        info = self._infos.get(EMBEDDING)
        shape = self._config.vocab_size, self._config.hidden_size
        if info is not None and info.form is not None:
            table = self._merged("embedding", [(EMBEDDING, "", shape[0], None)], shape[1])
            assert isinstance(table, Table)
            return table
        dtype = self._dtype
        if dtype == torch.float32 and info is not None:  # the narrowest that holds its values: the decoder widens rows
            dtype = torch.bfloat16 if info.is_bf16 else torch.float16 if info.fits_16_bits else dtype
        return self._matrix(EMBEDDING, shape, dtype)

    def _linear(self, parts: Sequence[tuple[str, int, Attention | None]], in_features: int) -> Linear:
        """Make a product from parts: name without suffix, out features, attention whose rotary pairs its rows form."""
        named = [(f"{name}.weight", f"{name}.bias", size, pairs) for name, size, pairs in parts]
        return self._merged(parts[0][0].rsplit(".", 1)[1], named, in_features)

    def _merged(self, role: str, parts: Sequence[tuple[str, str, int, Attention | None]], in_features: int) -> Linear:
        names = {name for weight, bias, _size, _pairs in parts for name in (weight, bias) if name in self._infos}
        sizes = [size for _weight, _bias, size, _pairs in parts]
        forms = self._forms([weight for weight, _bias, _size, _pairs in parts])
        linear = self._device.product(role, in_features, sizes, forms)
        for index, (weight, bias, size, pairs) in enumerate(parts):
            order = None if pairs is None else pair_order(size, pairs)
            self._take(weight, (size, in_features), partial(self._fill_part, linear, index, order))
            self._send(bias, (size,), partial(self._fill_bias, linear, index, order))
        self._unfinished.append((names, linear))
        return linear

    def _fill_part(self, linear: Linear, part: int, order: Tensor | None, weight: StoredWeight) -> None:
        linear.fill(part, self._device.read(weight, None if order is None else order.numpy()))

    def _fill_bias(self, linear: Linear, part: int, order: Tensor | None, bias: Tensor) -> None:
        linear.fill_bias(part, bias if order is None else bias[order])

    def _forms(self, weights: Sequence[str]) -> PartForms:
        """Return how weights are stored."""
        infos = [self._infos.get(name) for name in weights]
        forms = [None if info is None else info.form for info in infos]
        return PartForms(forms, fit_16_bits=all(info.fits_16_bits for info in infos if info is not None))

    def _vector(self, name: str, size: int, *, pairs: Attention | None = None) -> Tensor:
        """Make a norm's weight; the files of some families hold it minus one."""
        vector = torch.empty(size, dtype=self._dtype, device=self._place)
        order = slice(None) if pairs is None else pair_order(size, pairs)
        more = 1.0 if self._config.norm.plus_one else 0.0
        self._send(name, (size,), lambda values: vector.copy_(values[order].float() + more))
        return vector

    def _matrix(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        matrix = torch.empty(shape, dtype=dtype, device=self._place)
        self._send(name, shape, matrix.copy_)
        return matrix

    def _send(self, name: str, shape: tuple[int, ...], fill: Callable[[Tensor], object]) -> None:
        """Name what takes the floats of a weight."""

        def fill_floats(weight: StoredWeight) -> None:
            fill(floats_of(weight))

        self._take(name, shape, fill_floats)

    def _take(self, name: str, shape: tuple[int, ...], fill: Callable[[StoredWeight], None]) -> None:
        self._places.setdefault(name, []).append(Place(shape, fill))


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
