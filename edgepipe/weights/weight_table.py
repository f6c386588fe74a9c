"""The forms of a model's weights, without the weights: what the sizes of its layers follow from."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as fields_of
from typing import Any, TypeVar, cast

from edgepipe.errors import ModelInvalid
from edgepipe.files.fields import Fields
from edgepipe.files.strict_json import parse_json_object
from edgepipe.spec.facts import LayerRange, ModelConfig, Slice
from edgepipe.spec.layer_spec import LayerSpec
from edgepipe.spec.layout import EMBEDDING, HEAD, is_expert, spec_tensors
from edgepipe.spec.packed_form import CODEBOOKS, PackedForm
from edgepipe.spec.shape_limits import MAX_INTERMEDIATE, MAX_LAYERS
from edgepipe.spec.tensors import WeightInfo, WeightSource

LayerForms = tuple[tuple[str, PackedForm], ...]
"""Packed weights of one layer by their name within it ("mlp.up_proj.weight"), sorted; all others are floats."""

MAX_TABLE_BYTES = 1 << 20  # limit of the JSON; a model of 126 layers that all differ takes about 30 kB

_IN_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.(.+)")
_WHAT = "the description of the model's weights"
_OFFSETS = ("none", "zero", "zeros", "added")
_MAX_FORMS = 256

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelNeed:
    """A draft model that takes memory beside another model's head."""

    config: ModelConfig
    weights: WeightTable
    kv_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTable:
    """Forms of all weights of a model. Layers of equal forms share a class."""

    classes: tuple[LayerForms, ...] = ()
    layers: tuple[int, ...] = ()  # class of each layer; further layers hold floats
    embedding: PackedForm | None = None
    head: PackedForm | None = None  # form of a head that is not the embedding
    float32_experts: tuple[int, ...] = ()  # classes with experts that, as floats, need 32 bits
    draft: DraftModelNeed | None = None  # a draft model on the device with the head; ``to_json`` leaves it out

    @property
    def packed(self) -> bool:
        """Whether any weight is packed."""
        return next(self._forms(), None) is not None

    def layer(self, index: int) -> Mapping[str, PackedForm]:
        """Return the forms of a layer's packed weights by their name within it."""
        return dict(self.classes[self.layers[index]]) if index < len(self.layers) else {}

    def experts_fit_16_bits(self, index: int) -> bool:
        """Return whether floats of 16 bits hold the experts of a layer. See ``WeightInfo.fits_16_bits``."""
        return index >= len(self.layers) or self.layers[index] not in self.float32_experts

    def form(self, name: str) -> PackedForm | None:
        """Return the form of a weight by its Hugging Face name; None for floats."""
        if (found := _IN_LAYER.fullmatch(name)) is not None:
            return self.layer(int(found[1])).get(found[2])
        return {EMBEDDING: self.embedding, HEAD: self.head}.get(name)

    def to_json(self) -> str:
        """Return a compact text for other processes; empty if all weights are floats and no expert needs 32 bits."""
        if replace(self, draft=None) == FLOATS:
            return ""
        forms = list(dict.fromkeys(self._forms()))
        value: dict[str, Any] = {
            "forms": [_form_json(form) for form in forms],
            "classes": [{name: forms.index(form) for name, form in each} for each in self.classes],
            "layers": self.layers,
        }
        if self.float32_experts:
            value["float32_experts"] = self.float32_experts
        for name, form in (("embedding", self.embedding), ("head", self.head)):
            if form is not None:
                value[name] = forms.index(form)
        return json.dumps(value, separators=(",", ":"))

    def _forms(self) -> Iterator[PackedForm]:
        yield from (form for each in self.classes for _, form in each)
        yield from (form for form in (self.embedding, self.head) if form is not None)


FLOATS = WeightTable()
"""The table of a model whose weights are floats, the experts' of 16 bits."""


def table_of(weights: Iterable[WeightInfo]) -> WeightTable:
    """Return the table of these weights. Weights that are not listed count as floats of 16 bits."""
    layers: dict[int, dict[str, PackedForm]] = {}
    tables: dict[str, PackedForm] = {}
    float32_experts: set[int] = set()
    for weight in weights:
        if is_expert(weight.name) and len(weight.shape) == 2 and not weight.fits_16_bits:
            float32_experts.add(int(weight.name.split(".")[2]))
        if weight.form is None:
            continue
        if (found := _IN_LAYER.fullmatch(weight.name)) is not None:
            layers.setdefault(int(found[1]), {})[found[2]] = weight.form
        else:
            tables[weight.name] = weight.form
    last = max({*layers, *float32_experts}, default=-1)
    return make_table(
        [tuple(sorted(layers.get(index, {}).items())) for index in range(last + 1)],
        embedding=tables.get(EMBEDDING),
        head=tables.get(HEAD),
        float32_experts=float32_experts,
    )


def make_table(
    layers: Iterable[LayerForms],
    *,
    embedding: PackedForm | None = None,
    head: PackedForm | None = None,
    float32_experts: Collection[int] = (),
) -> WeightTable:
    """Return a table of layers in order, with a class for each kind of layer.

    ``float32_experts``: layers with experts that, as floats, need 32 bits.
    """
    by_layer = [(forms, index in float32_experts) for index, forms in enumerate(layers)]
    classes = list(dict.fromkeys(by_layer))
    if classes in ([], [((), False)]):
        return WeightTable(embedding=embedding, head=head)
    places = {each: index for index, each in enumerate(classes)}
    return WeightTable(
        classes=tuple(forms for forms, _ in classes),
        layers=tuple(places[each] for each in by_layer),
        embedding=embedding,
        head=head,
        float32_experts=tuple(index for index, (_, wide) in enumerate(classes) if wide),
    )


def read_table(source: WeightSource) -> WeightTable:
    """Return the table of a whole model. Raises ModelInvalid."""
    whole = Slice(index=0, layers=LayerRange(0, source.config.num_layers), embedding=True, head=True)
    return table_of(source.weights(whole))


def table_from_json(text: str, config: ModelConfig) -> WeightTable:
    """Restore the table that ``WeightTable.to_json`` wrote. Raises ModelInvalid if it does not fit the config."""
    if not text:
        return FLOATS
    if len(text) > MAX_TABLE_BYTES:
        raise ModelInvalid(f"{_WHAT} is too long", fact=f"{len(text)} bytes")
    fields = Fields(parse_json_object(text.encode(), what=_WHAT), what=_WHAT)
    forms = [_form(value, fields) for value in fields.items("forms")]
    if len(forms) > _MAX_FORMS:
        raise fields.fail("forms", f"it has {len(forms)} entries, at most {_MAX_FORMS} are read")
    classes = [_layer(value, forms, fields) for value in fields.items("classes")]
    layers = fields.items("layers")
    every = config.with_mtp()  # tables of files have its form, too
    if len(layers) > every.num_layers or len(classes) > MAX_LAYERS:
        raise fields.fail("layers", f"the model has {every.num_layers} layers, the list {len(layers)}")
    shape = (config.vocab_size, config.hidden_size)
    tables = [
        _checked(_item(fields.raw(key), forms, fields), shape, fields, key) if fields.has(key) else None
        for key in ("embedding", "head")
    ]
    own = [_item(index, classes, fields) for index in layers]
    for spec, named in dict.fromkeys(zip(every.layers, own, strict=False)):
        _check_layer(spec_tensors(spec, config.hidden_size), named, fields)
    wide = {_place(index, classes, fields) for index in fields.items("float32_experts")}
    float32_experts = [layer for layer, index in enumerate(layers) if index in wide]
    return make_table(own, embedding=tables[0], head=tables[1], float32_experts=float32_experts)


def _form_json(form: PackedForm) -> dict[str, Any]:
    """Return the fields that differ from their defaults."""
    values = {field.name: (getattr(form, field.name), field.default) for field in fields_of(form)}
    return {name: value for name, (value, default) in values.items() if value != default}


def _form(value: object, table: Fields) -> PackedForm:
    if not isinstance(value, dict):
        raise table.fail("forms", "a list of objects is needed")
    read = Fields(cast("dict[str, object]", value), what=_WHAT)
    form = PackedForm(
        bits=read.integer("bits", low=4, high=8),
        group=read.integer("group", low=1, high=MAX_INTERMEDIATE),
        span=read.integer("span", low=0, high=MAX_INTERMEDIATE, default=0),
        base_bits=read.integer("base_bits", low=16, high=32, default=16),
        offset=cast("Any", read.text("offset", default="none")),
        codebook=read.text("codebook", default=""),
        ordered=read.flag("ordered", default=False),
    )
    sane = form.bits != 7 and form.base_bits in (16, 32) and form.span % form.group == 0
    if not sane or form.offset not in _OFFSETS or form.codebook not in ("", *CODEBOOKS):
        raise table.fail("forms", f"{form} is unknown")
    return form


def _layer(value: object, forms: list[PackedForm], table: Fields) -> LayerForms:
    if not isinstance(value, dict):
        raise table.fail("classes", "a list of objects is needed")
    entries = sorted(cast("dict[str, object]", value).items())
    return tuple((name, _item(index, forms, table)) for name, index in entries)


def _check_layer(shapes: Mapping[str, tuple[int, ...]], named: LayerForms, table: Fields) -> None:
    """Check that a layer's weights can have these forms. Raises ModelInvalid."""
    for name, form in named:
        if name not in shapes:
            raise table.fail("classes", f"a layer has no weight {name[:80]!r}")
        _checked(form, shapes[name], table, name)


def _checked(form: PackedForm, shape: tuple[int, ...], table: Fields, name: str) -> PackedForm:
    """Return the form if a weight of this shape can have it. Raises ModelInvalid."""
    if len(shape) != 2 or shape[1] % (form.span or form.group) or shape[1] % 8:
        raise table.fail("forms", f"{name[:80]!r} {list(shape)} has no groups of {form.span or form.group}")
    return form


def _item(index: object, items: list[T], table: Fields) -> T:
    return items[_place(index, items, table)]


def _place(index: object, items: Sequence[object], table: Fields) -> int:
    if type(index) is not int or not 0 <= index < len(items):
        raise table.fail("classes", f"{str(index)[:40]} is not an index")
    return index


def only_layers(
    config: ModelConfig, table: WeightTable, wanted: Callable[[LayerSpec], bool]
) -> tuple[ModelConfig, WeightTable]:
    """Return the model cut down to the layers with a property, at least one, and their forms."""
    chosen = [index for index, spec in enumerate(config.layers) if wanted(spec)]
    forms = [tuple(sorted(table.layer(index).items())) for index in chosen]
    config = replace(config, layers=tuple(config.layers[index] for index in chosen))
    return config, make_table(forms, embedding=table.embedding, head=table.head)
