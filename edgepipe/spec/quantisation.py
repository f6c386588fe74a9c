"""How a model's weights are stored if a weight is several tensors; part of ``ModelConfig``. Values only.

``edgepipe.spec.formats`` knows each format's tensors; ``edgepipe.spec.quantisation_config`` reads ``config.json``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from edgepipe.errors import ModelInvalid
from edgepipe.files.fields import Fields

_MAX_MODULES = 50_000
_MAX_NAME = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """How a weight [O, I] is stored. ``formats.check_format`` checks which values belong together."""

    kind: str  # a key of formats.FORMATS
    bits: int = 4  # bits of a code
    group: int = 0  # inputs that share a scale; 0: all of a row
    rows: int = 1  # rows that share a scale (FP8); 0: all
    scale: str = "F16"  # type of the scales
    zeros: bool = False  # every group stores a zero
    indexed: bool = False  # the group of each input is stored (g_idx)
    ordered: bool = False  # groups hold inputs that are no neighbours (act-order)


@dataclass(frozen=True, kw_only=True)
class Quantisation:
    """The formats of a model's weights, by module (``model.layers.0.mlp.up_proj``, ``lm_head``)."""

    default: WeightFormat  # format of linear layers within decoder layers
    others: tuple[tuple[str, WeightFormat | None], ...] = ()  # modules that differ; None: floats
    alternatives: tuple[WeightFormat, ...] = ()  # formats that config.json names for modules given by patterns;
    # empty once the stored tensors decided

    @cached_property
    def _by_module(self) -> Mapping[str, WeightFormat | None]:
        return dict(self.others)

    def of(self, module: str) -> WeightFormat | None:
        """Return a module's format; None: floats. Embedding and head are floats unless ``others`` names them."""
        if module in self._by_module:
            return self._by_module[module]
        return self.default if module.startswith("model.layers.") else None

    @property
    def formats(self) -> tuple[WeightFormat, ...]:
        """All formats that occur, the default first."""
        others = (stored for _, stored in self.others if stored is not None)
        return tuple(dict.fromkeys((self.default, *others, *self.alternatives)))


def quantisation_to_json(quantisation: Quantisation) -> dict[str, Any]:
    """Convert to plain JSON values without defaults; ``quantisation_from_json`` restores an equal value."""
    others = {module: None if stored is None else _plain(stored) for module, stored in quantisation.others}
    value: dict[str, Any] = {"default": _plain(quantisation.default)}
    value |= {"others": others} if others else {}
    alternatives = [_plain(stored) for stored in quantisation.alternatives]
    return value | ({"alternatives": alternatives} if alternatives else {})


def quantisation_from_json(value: object) -> Quantisation:
    """Restore what ``quantisation_to_json`` wrote. Raises ModelInvalid for values of a wrong type."""
    fields = _fields(value)
    others, alternatives = fields.raw("others"), fields.items("alternatives")
    modules = cast("dict[str, object]", others) if isinstance(others, dict) else {}
    count = len(modules) + len(alternatives)
    if count > _MAX_MODULES or any(len(name) > _MAX_NAME for name in modules):
        raise fields.fail("others", f"it has {count} entries")
    return Quantisation(
        default=_format(fields.raw("default")),
        others=tuple((name, None if item is None else _format(item)) for name, item in modules.items()),
        alternatives=tuple(_format(item) for item in alternatives),
    )


def _plain(stored: WeightFormat) -> dict[str, Any]:
    values = {field.name: getattr(stored, field.name) for field in dataclasses.fields(stored)}
    standard = WeightFormat(kind=stored.kind)
    return {name: value for name, value in values.items() if name == "kind" or value != getattr(standard, name)}


def _format(value: object) -> WeightFormat:
    fields = _fields(value)
    standard = WeightFormat(kind=fields.text("kind"))
    return WeightFormat(
        kind=standard.kind,
        bits=fields.integer("bits", low=1, high=8, default=standard.bits),
        group=fields.integer("group", low=0, high=1 << 20, default=standard.group),
        rows=fields.integer("rows", low=0, high=1 << 20, default=standard.rows),
        scale=fields.text("scale", default=standard.scale),
        zeros=fields.flag("zeros", default=standard.zeros),
        indexed=fields.flag("indexed", default=standard.indexed),
        ordered=fields.flag("ordered", default=standard.ordered),
    )


def _fields(value: object) -> Fields:
    if not isinstance(value, dict):
        raise ModelInvalid("the model's description cannot be used: 'quantisation'", fact="an object is needed")
    return Fields(cast("dict[str, object]", value), what="the model's quantisation")
