"""Names within the layer, and shapes, of the weights of mixers and feed-forward parts."""

from __future__ import annotations

from edgepipe.spec.layer_spec import Attention, DeltaNet, Dense, Experts, Latent, LayerSpec, Mamba2, ShortConv

KV_B = "self_attn.kv_b_proj.weight"
K_B, V_B = "self_attn.k_b_proj.weight", "self_attn.v_b_proj.weight"
EXACT = (".A_log", ".dt_bias", "mamba.D", ".conv1d.weight", ".conv1d.bias", "conv.conv.weight", "conv.conv.bias")
"""Ends of the names of recurrent mixers' weights that stay float32."""
MIXER_NORMS = ("linear_attn.norm.weight", "mamba.norm.weight")
"""Norms of a recurrent mixer's output."""

Shapes = dict[str, tuple[int, ...]]


def mixer_tensors(spec: LayerSpec, hidden: int) -> Shapes:
    """Return the weights of a layer's mixer, in reading order; none without a mixer."""
    if spec.attention is not None:
        return _attention(spec.attention, hidden)
    match spec.recurrent:
        case DeltaNet() as delta:
            return _delta_net(delta, hidden)
        case Mamba2() as mamba:
            return _mamba2(mamba, hidden)
        case ShortConv() as conv:
            return _short_conv(conv, hidden)
        case None:
            return {}


def feed_forward_tensors(spec: LayerSpec, hidden: int) -> Shapes:
    """Return the weights of a layer's dense part and its experts, in reading order; none without either."""
    shapes = {} if spec.dense is None else _dense("mlp", spec.dense, hidden)
    return shapes if spec.experts is None else shapes | _experts(spec.experts, hidden)


def _attention(attention: Attention, hidden: int) -> Shapes:
    if attention.latent is not None:
        return _latent_attention(attention, attention.latent, hidden)
    query, key = attention.query_width, attention.kv_width
    shapes: Shapes = {}
    names = ("q_proj", "k_proj") if attention.values_from_keys else ("q_proj", "k_proj", "v_proj")
    for name, rows in zip(names, (query * (1 + attention.gated), key, key), strict=False):
        shapes |= _linear(f"self_attn.{name}", rows, hidden, bias=attention.qkv_bias)
    if attention.qk_norm:
        widths = (attention.head_dim,) * 2 if attention.qk_norm == "head" else (query, key)
        shapes |= {"self_attn.q_norm.weight": (widths[0],), "self_attn.k_norm.weight": (widths[1],)}
    if attention.sinks:
        shapes["self_attn.sinks"] = (attention.num_heads,)
    return shapes | _linear("self_attn.o_proj", hidden, query, bias=attention.output_bias)


def _latent_attention(attention: Attention, latent: Latent, hidden: int) -> Shapes:
    """kv_b has for each head the rows of its keys [nope, rank], then of its values [value, rank].

    Or it is two weights, heads one below the other: keys transposed [heads * rank, nope], values [heads * value, rank].
    """
    heads, rank, bias = attention.num_heads, latent.kv_rank, attention.qkv_bias
    query = heads * (latent.nope_dim + latent.rope_dim)
    shapes: Shapes = {}
    if latent.query_rank:
        shapes |= _linear("self_attn.q_a_proj", latent.query_rank, hidden, bias=bias)
        shapes["self_attn.q_a_layernorm.weight"] = (latent.query_rank,)
        shapes |= _linear("self_attn.q_b_proj", query, latent.query_rank, bias=False)
    else:
        shapes |= _linear("self_attn.q_proj", query, hidden, bias=False)
    shapes |= _linear("self_attn.kv_a_proj_with_mqa", rank + latent.rope_dim, hidden, bias=bias)
    shapes["self_attn.kv_a_layernorm.weight"] = (rank,)
    if latent.joined:
        shapes[KV_B] = (heads * (latent.nope_dim + latent.value_dim), rank)
    else:
        shapes |= {K_B: (heads * rank, latent.nope_dim), V_B: (heads * latent.value_dim, rank)}
    return shapes | _linear("self_attn.o_proj", hidden, attention.output_width, bias=attention.output_bias)


def _delta_net(delta: DeltaNet, hidden: int) -> Shapes:
    """The projection's rows are all queries, then all keys, then all values."""
    values, name = delta.value_heads * delta.value_dim, "linear_attn"
    return {
        f"{name}.in_proj_qkv.weight": (delta.channels, hidden),
        f"{name}.in_proj_z.weight": (values, hidden),
        f"{name}.in_proj_b.weight": (delta.value_heads, hidden),
        f"{name}.in_proj_a.weight": (delta.value_heads, hidden),
        f"{name}.conv1d.weight": (delta.channels, delta.taps),
        f"{name}.dt_bias": (delta.value_heads,),
        f"{name}.A_log": (delta.value_heads,),
        f"{name}.norm.weight": (delta.value_dim,),
        f"{name}.out_proj.weight": (hidden, values),
    }


def _mamba2(mamba: Mamba2, hidden: int) -> Shapes:
    """The projection's rows are z, x, B, C and dt."""
    inner, name = mamba.heads * mamba.head_dim, "mamba"
    shapes = _linear(f"{name}.in_proj", inner + mamba.channels + mamba.heads, hidden, bias=mamba.bias)
    shapes |= _linear(f"{name}.conv1d", mamba.channels, mamba.taps, bias=mamba.conv_bias)
    shapes |= {f"{name}.{each}": (mamba.heads,) for each in ("dt_bias", "A_log", "D")}
    shapes[f"{name}.norm.weight"] = (inner,)
    return shapes | _linear(f"{name}.out_proj", hidden, inner, bias=mamba.bias)


def _short_conv(conv: ShortConv, hidden: int) -> Shapes:
    """The projection's rows are B, C and x."""
    return (
        _linear("conv.in_proj", 3 * conv.channels, hidden, bias=conv.bias)
        | _linear("conv.conv", conv.channels, conv.taps, bias=conv.bias)
        | _linear("conv.out_proj", hidden, conv.channels, bias=conv.bias)
    )


def _experts(experts: Experts, hidden: int) -> Shapes:
    count, router = experts.count, experts.router
    shapes = _linear("mlp.router", count, hidden, bias=router.bias)
    if router.correction:
        shapes["mlp.router.correction"] = (count,)
    if router.input_eps is not None:
        shapes["mlp.router.input_scale"] = (hidden,)
    if router.expert_scales:
        shapes["mlp.router.expert_scale"] = (count,)
    width = experts.latent or hidden
    if experts.latent:
        shapes |= _linear("mlp.latent_in", width, hidden, bias=False)
        shapes |= _linear("mlp.latent_out", hidden, width, bias=False)
    for name in ("gate_proj", "up_proj") if experts.gated else ("up_proj",):
        shapes |= _linear(f"mlp.experts.{name}", count * experts.inner, width, bias=experts.bias)
    shapes |= _linear("mlp.experts.down_proj", count * width, experts.inner, bias=experts.bias)
    if experts.shared_inner:
        shapes |= _dense("mlp.shared_expert", Dense(inner=experts.shared_inner, gated=experts.gated), hidden)
    if experts.shared_gated:
        shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
    return shapes


def _dense(name: str, dense: Dense, hidden: int) -> Shapes:
    shapes = _linear(f"{name}.gate_proj", dense.inner, hidden, bias=dense.bias) if dense.gated else {}
    return (
        shapes
        | _linear(f"{name}.up_proj", dense.inner, hidden, bias=dense.bias)
        | _linear(f"{name}.down_proj", hidden, dense.inner, bias=dense.bias)
    )


def _linear(name: str, rows: int, columns: int, *, bias: bool) -> Shapes:
    return {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if bias else {})
