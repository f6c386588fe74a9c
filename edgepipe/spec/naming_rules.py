"""How a family's files name their tensors: the rules, without the families."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

EACH = "mlp.experts.{expert}.{matrix}"
GATES_AND_UPS = {"mlp.experts.gate_up_proj": ("mlp.experts.gate_proj", "mlp.experts.up_proj")}
"""One tensor [experts, 2 * inner, H] holds those of all experts; see ``Naming.fused``."""
MTP = "multi-token prediction"
_MTP_MODULES = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head.norm": "norm",
}
"""Qwen's names of the modules that only a layer with ``LayerSpec.mtp`` has."""
_EXPERT = re.compile(r"mlp\.experts\.(gate_proj|up_proj|down_proj)\b")


@dataclass(frozen=True, kw_only=True)
class Naming:
    """How a family's files name their tensors."""

    modules: Mapping[str, str] = field(default_factory=dict[str, str])  # edgepipe's name within a layer to the files'
    experts: str = ""  # pattern of each expert's matrices: "mlp.experts.{expert}.{matrix}"; empty: one tensor for all
    matrices: Mapping[str, str] = field(default_factory=dict[str, str])  # "gate_proj" to the files' name
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Stored modules that hold the rows of several modules of edgepipe's, in their order."""
    interleaved: bool = False  # rows of fused modules alternate
    parameters: bool = False  # all experts of a matrix are "mlp.experts.MATRIX" [experts, in, out] if stored as floats,
    # and "mlp.experts.MATRIX_bias" [experts, out]
    by_key_head: bool = False  # fused modules of a gated delta rule have each key head's rows side by side
    exponents: bool = False  # ``A_log`` is stored as ``-exp(A_log)``
    prefix: str = "model."  # text before "layers.", "embed_tokens" and "norm"
    tables: Mapping[str, str] = field(default_factory=dict[str, str])  # "embed_tokens" and "norm" to the files' names
    head: str = "lm_head"
    later_layers: bool = False  # files may hold layers beyond the model's, which predict several tokens at once
    skipped: tuple[str, ...] = ()  # regular expressions of tensors that edgepipe does not read
    unread: str = ""  # name of those tensors and later layers, for people
    # Text before "layers.0." and Qwen's names in the layer with ``LayerSpec.mtp``; empty: it is named as the others.
    mtp: str = ""

    def stored(self, name: str, *, expert: int | None = None, mtp: bool = False) -> str:
        """Return the stored name of a weight or bias.

        expert  of one expert's share
        mtp     of the layer that predicts one token more
        """
        if name.startswith("lm_head."):
            return self.head + name.removeprefix("lm_head")
        layers, dot, within = name.removeprefix("model.").partition(".")
        if layers != "layers":
            return self.prefix + self.tables.get(layers, layers) + dot + within
        layer, _, inner = within.partition(".")
        if mtp and self.mtp:
            module, _, suffix = inner.rpartition(".")
            if module in _MTP_MODULES:
                return f"{self.mtp}{_MTP_MODULES[module]}.{suffix}"
            return f"{self.mtp}layers.0.{self._within(inner, expert)}"
        return f"{self.prefix}layers{dot}{layer}.{self._within(inner, expert)}"

    def fused_with(self, module: str) -> tuple[str, ...]:
        """Return the modules within a layer that one stored module holds with this one, in order; () for none."""
        return next((modules for modules in self.fused.values() if module in modules), ())

    def mixes_key_heads(self, module: str) -> bool:
        """Return whether the rows of a module within a layer are stored with others, key head by key head."""
        return self.by_key_head and module.startswith("linear_attn.") and bool(self.fused_with(module))

    def _within(self, inner: str, expert: int | None) -> str:
        found = _EXPERT.match(inner)
        if found is not None and expert is not None:
            matrix = self.matrices.get(found[1], found[1])
            return self.experts.format(expert=expert, matrix=matrix) + inner[found.end() :]
        module, dot, suffix = inner.rpartition(".")
        module = next((name for name, modules in self.fused.items() if module in modules), module)
        if found is not None and self.parameters:
            return f"{module}_bias" if suffix == "bias" else module
        return self.modules.get(inner) or self.modules.get(module, module) + dot + suffix

    def skips(self, name: str) -> bool:
        """Return whether edgepipe leaves a stored tensor unread."""
        return any(re.match(pattern, name) for pattern in self.skipped)
