"""``edgepipe.json``: the description of a model that every node needs besides tensors, for every source format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from edgepipe.errors import ModelInvalid
from edgepipe.files.canonical import value_digest
from edgepipe.files.fields import Fields
from edgepipe.files.strict_json import parse_json_object, read_json_object
from edgepipe.spec.config_json import changed_values, config_from_json, config_to_json
from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.sampling_defaults import checked_sampling
from edgepipe.text.template import MAX_TEMPLATE_BYTES, ChatTemplate
from edgepipe.units import format_bytes
from edgepipe.weights.manifest import CARD_FILE, METADATA_LIMITS
from edgepipe.weights.mixes import mix_names

_MAX_CARD_BYTES = METADATA_LIMITS[CARD_FILE]
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """A model's shape and chat template. The config lists the end tokens, including those of chats."""

    config: ModelConfig
    template: ChatTemplate
    emulated: bool = False  # has no weights; only the emulated backend serves it
    mix: str = ""  # types of an emulated model's imagined weights (``edgepipe.weights.mixes``); empty: bf16
    sampling: Mapping[str, float] = field(default_factory=dict[str, float])  # defaults by parameter name

    def to_json(self) -> bytes:
        """Return the file's content. Raises ModelInvalid if it is larger than ``read_card`` accepts."""
        value = {
            "version": _VERSION,
            "config": config_to_json(self.config),
            "chat_templates": dict(self.template.sources),
            "special_tokens": dict(self.template.special_tokens),
            "emulated": self.emulated,
            "sampling": dict(self.sampling),
            **({"mix": self.mix} if self.mix else {}),
        }
        data = json.dumps(value, indent=1).encode()
        if len(data) > _MAX_CARD_BYTES:
            raise ModelInvalid(
                "the model's chat templates and special tokens are too long",
                fact=f"its description has {format_bytes(len(data))}, at most {format_bytes(_MAX_CARD_BYTES)} are read",
            )
        return data

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical form, independent of the version of edgepipe that wrote the card.

        Fields with their default value are left out. So a new field whose default means the former behaviour changes no
        model's digest. A default must never change.
        """
        return value_digest(
            {
                "config": changed_values(self.config),
                "chat_templates": dict(self.template.sources),
                "special_tokens": dict(self.template.special_tokens),
                "emulated": self.emulated,
                **({"sampling": dict(self.sampling)} if self.sampling else {}),
                **({"mix": self.mix} if self.mix else {}),
            }
        )

    @classmethod
    def from_json(cls, data: bytes) -> ModelCard:
        """Parse and check a card. Raises ModelInvalid."""
        return _card(parse_json_object(data, what=f"'{CARD_FILE}'"))


def read_card(folder: Path) -> ModelCard:
    """Read the card of a stored model. Raises ModelInvalid."""
    return _card(read_json_object(folder / CARD_FILE, max_bytes=_MAX_CARD_BYTES))


def _card(values: dict[str, Any]) -> ModelCard:
    fields = Fields(values, what=f"'{CARD_FILE}'")
    fields.integer("version", low=_VERSION, high=_VERSION)
    config = fields.raw("config")
    if not isinstance(config, dict):
        raise fields.fail("config", "it is missing")
    sources, special = _texts(fields, "chat_templates"), _texts(fields, "special_tokens")
    return ModelCard(
        config=config_from_json(cast("dict[str, Any]", config)),
        template=ChatTemplate(sources=sources, special_tokens=special),
        emulated=fields.flag("emulated", default=False),
        mix=_mix(fields),
        sampling=checked_sampling(_mapping(fields, "sampling")),
    )


def _mix(fields: Fields) -> str:
    mix = fields.text("mix", default="")
    if mix not in ("", *mix_names()):
        raise fields.fail("mix", f"{mix[:40]!r} is unknown")
    return mix


def _mapping(fields: Fields, key: str) -> dict[str, object]:
    value = fields.raw(key)
    return cast("dict[str, object]", value) if isinstance(value, dict) else {}


def _texts(fields: Fields, key: str) -> dict[str, str]:
    entries = _mapping(fields, key)
    if not all(isinstance(text, str) and len(text) <= MAX_TEMPLATE_BYTES for text in entries.values()):
        raise fields.fail(key, "texts are needed")
    return {name: str(text) for name, text in entries.items()}
