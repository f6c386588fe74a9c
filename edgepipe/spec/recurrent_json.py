"""Convert the recurrent mixers of ``layer_spec`` to and from JSON. Reading checks every value."""

from __future__ import annotations

import dataclasses
from math import inf
from typing import Any

from edgepipe.files.fields import Fields
from edgepipe.spec import shape_limits as limits
from edgepipe.spec.layer_spec import DeltaNet, Mamba2, Recurrent, ShortConv

_KINDS = {DeltaNet: "delta_net", Mamba2: "mamba2", ShortConv: "short_conv"}


def recurrent_to_json(recurrent: Recurrent) -> dict[str, Any]:
    """Return plain JSON values without fields that have their defaults, and the kind."""
    own = {field.name: (getattr(recurrent, field.name), field.default) for field in dataclasses.fields(recurrent)}
    values = {name: item for name, (item, default) in own.items() if item != default}
    if isinstance(recurrent, Mamba2) and "dt_limits" in values:
        values["dt_limits"] = [None if limit == inf else limit for limit in recurrent.dt_limits]
    return {"kind": _KINDS[type(recurrent)], **values}


def recurrent_from_json(fields: Fields) -> Recurrent:
    """Restore a recurrent mixer. Raises ModelInvalid."""
    match kind := fields.text("kind"):
        case "delta_net":
            return _delta_net(fields)
        case "mamba2":
            return _mamba2(fields)
        case "short_conv":
            return ShortConv(
                channels=fields.integer("channels", low=1, high=limits.MAX_WIDTH),
                taps=_taps(fields),
                bias=fields.flag("bias", default=False),
            )
        case _:
            raise fields.fail("kind", f"it is {kind[:40]!r}; one of {', '.join(_KINDS.values())} is needed")


def _delta_net(fields: Fields) -> DeltaNet:
    delta = DeltaNet(
        key_heads=fields.integer("key_heads", low=1, high=limits.MAX_HEADS),
        value_heads=fields.integer("value_heads", low=1, high=limits.MAX_HEADS),
        key_dim=fields.integer("key_dim", low=1, high=limits.MAX_HEAD_DIM),
        value_dim=fields.integer("value_dim", low=1, high=limits.MAX_HEAD_DIM),
        taps=_taps(fields),
        tiled=fields.flag("tiled", default=False),
    )
    return limits.checked_delta_net(fields, delta, "value_heads")


def _mamba2(fields: Fields) -> Mamba2:
    mamba = Mamba2(
        heads=fields.integer("heads", low=1, high=limits.MAX_HEADS),
        head_dim=fields.integer("head_dim", low=1, high=limits.MAX_HEAD_DIM),
        groups=fields.integer("groups", low=1, high=limits.MAX_HEADS),
        state_dim=fields.integer("state_dim", low=1, high=limits.MAX_HEAD_DIM),
        taps=_taps(fields),
        conv_bias=fields.flag("conv_bias", default=True),
        bias=fields.flag("bias", default=False),
        dt_limits=_dt_limits(fields),
    )
    return limits.checked_mamba2(fields, mamba, "groups")


def _taps(fields: Fields) -> int:
    return fields.integer("taps", low=2, high=limits.MAX_TAPS)


def _dt_limits(fields: Fields) -> tuple[float, float]:
    items = fields.items("dt_limits")
    if not items:
        return 0.0, inf
    if len(items) != 2:
        raise fields.fail("dt_limits", f"two limits are needed, it has {len(items)}")
    pair = Fields({"dt_limits": items[0], "upper": items[1]}, what=fields.what)
    low = pair.number("dt_limits", low=0.0, high=limits.MAX_TIME_STEP)
    return low, pair.number("upper", low=low, high=limits.MAX_TIME_STEP, default=inf)
