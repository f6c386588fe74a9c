"""Convert Hugging Face's ``config.json`` or GGUF metadata to a ``ModelConfig``; the only check of foreign values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from difflib import SequenceMatcher
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

from edgepipe.errors import ArchitectureUnsupported, ModelInvalid
from edgepipe.files.fields import Fields
from edgepipe.files.strict_json import read_json_object
from edgepipe.spec.config_json import config_from_json
from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.families import FAMILIES, gguf_family, hf_family
from edgepipe.spec.families.nemotron_h import NEMOTRON_H
from edgepipe.spec.families.reading import Family, FamilySpec, GgufShape, HfShape, unsupported
from edgepipe.spec.naming import settled_naming
from edgepipe.spec.quantisation_config import check_quantisation
from edgepipe.spec.sampling_defaults import GENERATION_FILE
from edgepipe.spec.shape_limits import MAX_VOCAB

EMULATED_KEY = "edgepipe_emulated"  # key of config.json: the model has a shape but no weights
# Key of an emulated model's config.json: its shape, where transformers has no class for it.
SHAPE_KEY = "edgepipe_shape"

_TIED = "tie_word_embeddings"
# Keys of the whole model that apply where the text model lacks its own.
_SHARED = (_TIED, "eos_token_id", "bos_token_id")
_LEAST_RATIO = 0.6  # least share of letters that two similar names have in common
_MAMBA_KEYS = ("mamba_", "ssm_", "state_size")  # beginnings of keys
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


def read_hf_config(folder: Path) -> ModelConfig:
    """Read the config of a model folder (``config.json``, end tokens also from ``generation_config.json``).

    Raises ModelInvalid, ArchitectureUnsupported.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ModelInvalid(f"'{folder.name}' is not a model folder", fact="it has no config.json")
    generation = folder / GENERATION_FILE
    return hf_config(
        read_json_object(path, infinite=True), read_json_object(generation) if generation.is_file() else None
    )


def hf_config(values: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Convert a parsed ``config.json`` (and ``generation_config.json``) to a ModelConfig.

    Raises ModelInvalid, and ArchitectureUnsupported, which lists the supported ones.
    """
    fields = Fields(values, what="config.json")
    if fields.raw(EMULATED_KEY) is True and fields.has(SHAPE_KEY):
        return _own_shape(fields)
    family = _family(fields)
    _refuse_foreign_code(fields, family)
    if family.text_key:
        fields = _text_fields(fields, family)
    fields = fields.over(family.defaults)
    shape = HfShape(fields, default_context=family.default_context)
    vocab = fields.integer("vocab_size", low=1, high=MAX_VOCAB)
    config = _config(
        family,
        family.from_hf(shape),
        shape,
        vocab=vocab,
        eos=_hf_eos(fields, generation, vocab),
        bos=fields.token_ids("bos_token_id", vocab_size=vocab),
        naming=family.naming,
    )
    return replace(config, quantisation=check_quantisation(values))


def gguf_config(
    metadata: Mapping[str, object],
    tensors: Mapping[str, tuple[int, ...]],
    rope_factors: Mapping[str, tuple[float, ...]] | None = None,
) -> ModelConfig:
    """Convert GGUF metadata and the tensors' row-major shapes (GGUF's names) to a ModelConfig.

    ``rope_factors``: the file's tensors of ``rope_config.ROPE_FACTORS``. Raises ModelInvalid, ArchitectureUnsupported.
    """
    fields = Fields(metadata, what="the GGUF metadata")
    arch = fields.text("general.architecture")
    experts = fields.integer(f"{arch}.expert_count", low=0, high=1 << 20, default=0)
    family = gguf_family(arch, experts=experts > 0)
    if family is None or family.from_gguf is None:
        names = {family.gguf: family for family in FAMILIES if family.gguf}
        kind = " with experts" if experts else " without experts" if arch in names else ""
        raise _unsupported(f"GGUF {arch}{kind}", names, _nearest(arch, names, experts > 0))
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding) != 2 or embedding[0] > MAX_VOCAB:
        raise ModelInvalid("the GGUF file has no usable token embedding", fact=f"token_embd.weight: {embedding}")
    shape = GgufShape(fields, arch, tensors, rope_factors or {})
    return _config(
        family,
        family.from_gguf(shape),
        shape,
        vocab=embedding[0],
        eos=_gguf_eos(fields, embedding[0]),
        bos=fields.token_ids("tokenizer.ggml.bos_token_id", vocab_size=embedding[0]),
        naming=settled_naming(family.gguf_naming, tensors),
    )


def _config(
    family: Family,
    decoder: FamilySpec,
    shape: HfShape | GgufShape,
    *,
    vocab: int,
    eos: tuple[int, ...],
    bos: tuple[int, ...],
    naming: str,
) -> ModelConfig:
    """Return the config of a decoder that ``family`` read; ``shape`` knows its context."""
    return ModelConfig(
        architecture=family.name,
        hidden_size=shape.hidden,
        vocab_size=vocab,
        context_length=shape.context,
        layers=decoder.layers,
        norm=decoder.norm,
        tied_embeddings=decoder.tied_embeddings,
        embedding_scale=decoder.embedding_scale,
        logit_scale=decoder.logit_scale,
        logit_softcap=decoder.logit_softcap,
        eos_token_ids=eos,
        bos_token_id=next(iter(bos), None),
        naming=naming,
        mtp=decoder.mtp,
    )


def _own_shape(fields: Fields) -> ModelConfig:
    """Return the shape of an emulated model that has edgepipe's own description."""
    value = fields.raw(SHAPE_KEY)
    if not isinstance(value, dict):
        raise fields.fail(SHAPE_KEY, "an object is needed")
    return config_from_json(cast("dict[str, Any]", value))


def _unsupported(found: str, names: Iterable[str], nearest: str = "") -> ArchitectureUnsupported:
    every = f"supported: {', '.join(_grouped(name.partition('For')[0] for name in names))}"
    return ArchitectureUnsupported(
        f"the architecture '{found[:80]}' is not supported",
        fact=f"the nearest is {nearest}; {every}" if nearest else every,
        next_step="choose a model of one of these families, e.g. edgepipe models pull demo",
    )


def _grouped(names: Iterable[str]) -> list[str]:
    """Join names that differ behind their letters: ``Qwen2/3/3Moe``."""
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        word = _word(name)
        groups.setdefault(word, []).append(name.removeprefix(word))
    return [word + "/".join(ends) for word, ends in groups.items()]


def _nearest(name: str, names: Mapping[str, Family], experts: bool) -> str:
    """Return the most similar of some names; empty if none with the same first letter is similar.

    First of the same word, then of families that have experts or not, then by letters, number and ending.
    """
    stem, _, end = name[:80].lower().partition("for")

    def similarity(other: str) -> tuple[bool, bool, float, float, bool]:
        own, _, ending = other.lower().partition("for")
        alike = names[other].with_experts in (experts, None)
        return _word(own) == _word(stem), alike, _ratio(own, stem), -abs(_number(own) - _number(stem)), ending == end

    alike = [other for other in names if other[:1].lower() == stem[:1]]  # Mamba is no Llama
    close = [other for other in alike if similarity(other)[0] or similarity(other)[2] >= _LEAST_RATIO]
    return max(close, key=similarity, default="")


def _word(stem: str) -> str:
    return "".join(takewhile(str.isalpha, stem))


def _number(stem: str) -> int:
    """Return the first digit, or 0."""
    return next((int(char) for char in stem if char in "123456789"), 0)


def _ratio(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()


def _family(fields: Fields) -> Family:
    names = [name for name in fields.items("architectures") if isinstance(name, str)]
    kind = fields.text("model_type", default="")
    if not names:
        names = [family.hf_class for family in FAMILIES if family.name == kind][:1]
    found = next((family for name in names if (family := hf_family(name))), None)
    if found is None:
        known = {family.hf_class: family for family in FAMILIES}
        text = fields.raw("text_config")
        keys = {*fields, *(cast("dict[str, object]", text) if isinstance(text, dict) else ())}
        experts = "Moe" in "".join(names[:1]) or not keys.isdisjoint(_EXPERT_KEYS)
        nearest = _nearest(names[0], known, experts) if names else ""
        if not nearest and any(key.startswith(_MAMBA_KEYS) for key in keys):
            nearest = NEMOTRON_H.hf_class
        raise _unsupported(", ".join(names) or kind or "unknown", known, nearest)
    return found


def _text_fields(fields: Fields, family: Family) -> Fields:
    """Return the description of the text model among several."""
    key = family.text_key
    value = fields.raw(key)
    if not isinstance(value, dict):
        raise fields.fail(key, "an object is needed")
    own = cast("dict[str, object]", value)
    tied = {_TIED: True} if fields.raw(_TIED) is True else {}  # see ``settling.settled_head``
    text = Fields({**own, **tied}, what=f"config.json's {key}")
    kind = text.text("model_type", default="")
    if kind and family.text_types and kind not in family.text_types:
        raise unsupported(f"{family.hf_class} with {key} {kind}", family.text_types)
    return text.over({shared: fields.raw(shared) for shared in _SHARED if fields.has(shared)})


def _refuse_foreign_code(fields: Fields, family: Family) -> None:
    """Refuse a model whose class is defined in its folder. Raises ModelInvalid.

    Of families that were published with code first, that code defines the family's class.
    """
    value = fields.raw("auto_map")
    classes = cast("dict[str, object]", value) if isinstance(value, dict) else {}
    own = str(classes.get("AutoModelForCausalLM", "")).rpartition(".")[2]
    if value is not None and not (family.own_code and own == family.hf_class):
        raise ModelInvalid(
            "config.json needs code from the model's folder ('auto_map')",
            fact="edgepipe runs no code that comes with a model",
            next_step="choose a model without custom code",
        )


def _hf_eos(fields: Fields, generation: Mapping[str, Any] | None, vocab: int) -> tuple[int, ...]:
    ids = fields.token_ids("eos_token_id", vocab_size=vocab)
    if generation is not None:
        ids += Fields(generation, what="generation_config.json").token_ids("eos_token_id", vocab_size=vocab)
    return tuple(dict.fromkeys(ids))


def _gguf_eos(fields: Fields, vocab: int) -> tuple[int, ...]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    ids = [token for key in keys for token in fields.token_ids(key, vocab_size=vocab)]
    return tuple(dict.fromkeys(ids))
