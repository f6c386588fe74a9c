"""Values and messages: every field arrives, what is unknown is refused, no message has a field that values lack."""

from __future__ import annotations

import dataclasses
import typing
from enum import Enum
from functools import cache
from typing import Any, NewType

import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from edgepipe.backend.types import StageSettings
from edgepipe.errors import EdgepipeError, NodeUnreachable, RemoteProtocolError
from edgepipe.planner import profiles
from edgepipe.sampling.bounds import Within
from edgepipe.spec.facts import LayerRange
from edgepipe.wire import children, common, engines, nodes, pipelines, serving, tiers, trust
from edgepipe.wire.bounds import MESSAGE_BOUNDS
from edgepipe.wire.bounds.rules import Most, Rule
from edgepipe.wire.codec import from_wire, to_wire
from edgepipe.wire.v1 import common_pb2, engine_pb2, node_pb2, stage_pb2, trust_pb2

MODULES = (common_pb2, engine_pb2, node_pb2, stage_pb2, trust_pb2)
VALUES = [
    kind
    for module in (children, common, engines, nodes, serving, tiers, trust)
    for kind in vars(module).values()
    if dataclasses.is_dataclass(kind) and isinstance(kind, type) and kind.__module__ == module.__name__
] + [pipelines.OpenRing, pipelines.PipelineSpec, StageSettings]
NAMES: dict[type[Any], str] = {  # where the message has another
    pipelines.PipelineSpec: "OpenPipeline",
    profiles.Point: "ProfilePoint",
}
NUMBERS = {int: st.integers(1, 60_000), float: st.floats(-1e9, 1e9), bool: st.booleans()}


def message_of(kind: type[Any]) -> type[Message]:
    name = NAMES.get(kind, kind.__name__)
    return next(found for module in MODULES if (found := getattr(module, name, None)) is not None)


def values(hint: Any, rule: Rule | None = None) -> st.SearchStrategy[Any]:
    """Any value of a type, with numbers that the field's rule lets in."""
    if isinstance(hint, NewType):
        return values(hint.__supertype__, rule)
    if hint is LayerRange:
        return st.tuples(st.integers(0, 90), st.integers(1, 9)).map(lambda pair: LayerRange(pair[0], sum(pair)))
    if hint is EdgepipeError:
        return st.text("abc", max_size=9).map(NodeUnreachable)
    if typing.get_origin(hint) is tuple:
        each = rule.each if isinstance(rule, Most) else rule
        return st.lists(values(typing.get_args(hint)[0], each), max_size=2).map(tuple)
    if arms := typing.get_args(hint):
        return st.one_of(*map(values, arms))
    if hint is type(None):
        return st.none()
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(hint)
    if hint is trust.PairMessage:
        one_each = {name: typing.get_args(known)[0] for name, known in typing.get_type_hints(hint).items()}
        return st.one_of([st.builds(hint, **{name: values(inner)}) for name, inner in one_each.items()])
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return records(hint)
    if isinstance(rule, Within) and hint is int:
        return st.integers(max(1, int(rule.lowest)), min(60_000, int(rule.highest)))
    if isinstance(rule, Within) and hint is float:
        return st.floats(max(-1e9, rule.lowest), min(1e9, rule.highest))
    return {**NUMBERS, str: st.text("abcé", min_size=1, max_size=9), bytes: st.binary(min_size=1, max_size=9)}[hint]


@cache
def records(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Any value of a dataclass."""
    hints, rules = typing.get_type_hints(kind), MESSAGE_BOUNDS.get(message_of(kind).DESCRIPTOR.name, {})
    fields = [field.name for field in dataclasses.fields(kind)]
    return st.builds(kind, **{name: values(hints[name], rules.get(name)) for name in fields})


@pytest.mark.parametrize("kind", VALUES, ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=20)
def test_every_value_arrives_as_it_was_sent(kind: type[Any], data: st.DataObject) -> None:
    value = data.draw(values(kind))
    message_class = message_of(kind)
    sent = message_class.FromString(to_wire(value, message_class).SerializeToString())
    assert from_wire(sent, kind) == value


@pytest.mark.parametrize("kind", VALUES, ids=lambda kind: kind.__name__)
def test_no_field_of_a_message_is_forgotten(kind: type[Any]) -> None:
    """Only the hello of a request is for the service that takes it, not for what it calls."""
    descriptor = message_of(kind).DESCRIPTOR
    own = {field.name for field in dataclasses.fields(kind)}
    for oneof in descriptor.oneofs:
        if oneof.name in own:
            own |= {field.name for field in oneof.fields}
    assert {field.name for field in descriptor.fields} - own <= {"hello"}


def test_an_unknown_enumerator_and_an_unknown_kind_are_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="activation type"):
        from_wire(common_pb2.StageSettings(block_size=16), StageSettings)
    with pytest.raises(RemoteProtocolError, match="unknown kind"):
        from_wire(node_pb2.ChildReport(), children.ChildReport)


def test_a_value_and_a_message_that_do_not_fit_are_a_mistake_of_ours() -> None:
    with pytest.raises(TypeError, match="has no field"):
        to_wire(children.LoadWanted(model="m"), node_pb2.StopChild)
