"""Convert ``ModelConfig`` to and from JSON, for ``edgepipe.json`` and peers. Reading checks every value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

from edgepipe.errors import ArchitectureUnsupported
from edgepipe.files.fields import Fields
from edgepipe.spec import shape_limits as limits
from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.families import FAMILIES
from edgepipe.spec.formats import check_format
from edgepipe.spec.layer_json import layer_from_json, norm_from_json, without_defaults
from edgepipe.spec.layer_spec import LayerSpec
from edgepipe.spec.naming import NAMINGS
from edgepipe.spec.quantisation import Quantisation, quantisation_from_json, quantisation_to_json

_FAMILIES = tuple(family.name for family in FAMILIES)

_MAX_KINDS = 256  # limit of the kinds of layers
_MAX_SCALE = 1e6
_SCALES = ("embedding_scale", "logit_scale")


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """Convert a config to plain JSON values, each kind of layer once; ``config_from_json`` restores an equal config."""
    kinds = list(dict.fromkeys(config.layers))
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    del values["quantisation"], values["mtp"]
    values |= {
        "norm": asdict(config.norm),
        "kinds": [without_defaults(kind) for kind in kinds],
        "layers": [kinds.index(layer) for layer in config.layers],
    }
    if config.mtp is not None:
        values["mtp"] = without_defaults(config.mtp)
    return values | ({"quantisation": quantisation_to_json(config.quantisation)} if config.quantisation else {})


def changed_values(config: ModelConfig) -> dict[str, Any]:
    """Return the values of a config without those that are defaults: what a digest of the config is made of."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    values = config_to_json(config)
    return {name: value for name, value in values.items() if name == "kinds" or getattr(config, name) != defaults[name]}


def config_from_json(values: Mapping[str, Any]) -> ModelConfig:
    """Restore the config that ``config_to_json`` wrote. Raises ModelInvalid, ArchitectureUnsupported."""
    fields = Fields(values, what="the model's description")
    family = fields.text("architecture")
    if family not in _FAMILIES:
        raise ArchitectureUnsupported(
            f"the architecture '{family[:80]}' is not supported", fact=f"supported: {', '.join(_FAMILIES)}"
        )
    vocab = fields.integer("vocab_size", low=1, high=limits.MAX_VOCAB)
    kinds = [layer_from_json(item) for item in fields.items("kinds")]
    places = fields.items("layers")
    good = all(type(place) is int and 0 <= place < len(kinds) for place in places)
    if not good or not 0 < len(places) <= limits.MAX_LAYERS or len(kinds) > _MAX_KINDS:
        raise fields.fail("layers", f"it has {len(places)} layers of {len(kinds)} kinds")
    layers = tuple(kinds[place] for place in cast("list[int]", places))
    if any(layer.mtp for layer in layers[:-1]) or len(layers) == layers[-1].mtp:
        raise fields.fail("layers", "only the last of several layers can predict one token more")
    naming = fields.text("naming", default="")
    if naming not in NAMINGS:
        raise fields.fail("naming", f"{naming[:40]!r} is unknown")
    bos = fields.token_ids("bos_token_id", vocab_size=vocab)
    scales = {name: fields.number(name, low=0.0, high=_MAX_SCALE, default=1.0) for name in _SCALES}
    return ModelConfig(
        architecture=family,
        hidden_size=fields.integer("hidden_size", low=1, high=limits.MAX_WIDTH),
        vocab_size=vocab,
        context_length=fields.integer("context_length", low=1, high=limits.MAX_CONTEXT),
        layers=layers,
        norm=norm_from_json(fields.raw("norm")),
        tied_embeddings=fields.flag("tied_embeddings", default=False),
        embedding_scale=scales["embedding_scale"],
        logit_scale=scales["logit_scale"],
        logit_softcap=fields.number("logit_softcap", low=0.0, high=_MAX_SCALE, default=0.0),
        eos_token_ids=fields.token_ids("eos_token_ids", vocab_size=vocab),
        bos_token_id=bos[0] if bos else None,
        quantisation=_quantisation(fields),
        naming=naming,
        mtp=_mtp(fields, layers),
    )


def _mtp(fields: Fields, layers: Sequence[LayerSpec]) -> LayerSpec | None:
    value = fields.raw("mtp")
    if value is None:
        return None
    found = layer_from_json(value)
    if not found.mtp or layers[-1].mtp:
        raise fields.fail("mtp", "it does not predict one token more, or the last layer does, too")
    return found


def _quantisation(fields: Fields) -> Quantisation | None:
    value = fields.raw("quantisation")
    if value is None:
        return None
    quantisation = quantisation_from_json(value)
    for stored in quantisation.formats:
        check_format(stored)
    return quantisation
