"""Bounds of the numbers in a model's config, and checks of those that depend on others."""

from __future__ import annotations

from typing import NamedTuple

from edgepipe.files.fields import Fields
from edgepipe.spec.layer_spec import Attention, DeltaNet, Experts, Mamba2

# Caps far above existing models (Llama 3.1 405B: 126 layers, hidden 16384), far below exhausting any resource.
MAX_LAYERS = 1024
MAX_WIDTH = 1 << 17
MAX_INTERMEDIATE = 1 << 20
MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_EXPERTS = 4096
MAX_VOCAB = 1 << 21
MAX_CONTEXT = 1 << 25
MAX_TAPS = 64  # tokens that a convolution reads; models have 3 or 4
MAX_TIME_STEP = 1e6  # limit of Mamba-2's time step


def read_head_dim(fields: Fields, key: str, hidden: int, heads: int, default: int | None) -> int:
    """Return the head size under ``key``, else ``default``, else hidden size over heads. Raises ModelInvalid."""
    if not fields.has(key) and default is None:
        if hidden % heads:
            raise fields.fail(key, f"{heads} heads do not divide the hidden size {hidden}, and it is missing")
        default = hidden // heads
    head_dim = fields.integer(key, low=2, high=MAX_HEAD_DIM, default=default)
    if head_dim % 2 or not 2 <= head_dim <= MAX_HEAD_DIM:
        raise fields.fail(key, f"it is {head_dim}; rotary embedding needs an even head size from 2 to {MAX_HEAD_DIM}")
    return head_dim


def read_kv_heads(fields: Fields, key: str, heads: int, default: int | None) -> int:
    """Return the number of key-value heads under ``key``, else ``default``, else ``heads``. Raises ModelInvalid."""
    kv_heads = fields.integer(key, low=1, high=MAX_HEADS, default=default or heads)
    if heads % kv_heads:
        raise fields.fail(key, f"{kv_heads} key-value heads do not divide {heads} heads")
    return kv_heads


class ExpertKeys(NamedTuple):
    """What a file calls numbers of a mixture of experts."""

    used: str = "used"
    groups: str = "groups"
    groups_used: str = "groups_used"


OWN_KEYS = ExpertKeys()
"""Keys that edgepipe gives ``Experts`` and ``Router`` itself."""


def checked_experts(fields: Fields, experts: Experts, keys: ExpertKeys = OWN_KEYS) -> Experts:
    """Return experts whose numbers fit together; ``keys``: for errors. Raises ModelInvalid."""
    router, count, used = experts.router, experts.count, experts.used
    if used > count:
        raise fields.fail(keys.used, f"each token uses {used} of {count} experts")
    if count % router.groups:
        raise fields.fail(keys.groups, f"{count} experts cannot be in {router.groups} groups of equal size")
    if router.groups_used > router.groups:
        raise fields.fail(
            keys.groups_used, f"each token uses {router.groups_used} of {router.groups} groups of experts"
        )
    if used > (most := count // router.groups * router.groups_used):
        raise fields.fail(keys.used, f"each token uses {used} experts of groups that hold {most}")
    return experts


def checked_latent(fields: Fields, attention: Attention) -> Attention:
    """Return attention whose latent part, if it has one, fits its heads. Raises ModelInvalid."""
    latent, found = attention.latent, (attention.num_kv_heads, attention.head_dim, attention.rotated)
    if latent is None:
        return attention
    needed = (1, latent.kv_rank + latent.rope_dim, latent.rope_dim)
    if found != needed or attention.qk_norm:
        raise fields.fail("latent", f"key heads, their size and what rotates are {found} instead of {needed}")
    return attention


def checked_delta_net(fields: Fields, delta: DeltaNet, key: str) -> DeltaNet:
    """Return a gated delta rule whose heads fit together; ``key``: of its value heads, for errors.

    Raises ModelInvalid.
    """
    if delta.value_heads % delta.key_heads:
        raise fields.fail(key, f"{delta.key_heads} key heads do not divide {delta.value_heads} value heads")
    return delta


def checked_mamba2(fields: Fields, mamba: Mamba2, key: str) -> Mamba2:
    """Return a state space whose heads fit its groups; ``key``: of the groups, for errors. Raises ModelInvalid."""
    if mamba.heads % mamba.groups:
        raise fields.fail(key, f"{mamba.groups} groups do not divide {mamba.heads} heads")
    return mamba
