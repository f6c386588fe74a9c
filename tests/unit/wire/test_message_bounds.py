"""Every number and every list in a message between processes has a rule, and what a rule forbids is refused."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from edgepipe.errors import RemoteProtocolError
from edgepipe.sampling.bounds import Within
from edgepipe.wire.bounds import MESSAGE_BOUNDS, check_numbers
from edgepipe.wire.bounds.rules import Checked, Harmless, Most
from edgepipe.wire.v1 import common_pb2, engine_pb2, node_pb2, stage_pb2, trust_pb2

MODULES = (common_pb2, engine_pb2, node_pb2, stage_pb2, trust_pb2)
MESSAGES: dict[str, Descriptor] = {
    name: descriptor for module in MODULES for name, descriptor in module.DESCRIPTOR.message_types_by_name.items()
}
FLOATS = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)
HIGHEST = {
    FieldDescriptor.TYPE_INT32: (1 << 31) - 1,
    FieldDescriptor.TYPE_UINT32: (1 << 32) - 1,
    FieldDescriptor.TYPE_INT64: (1 << 63) - 1,
    FieldDescriptor.TYPE_UINT64: (1 << 64) - 1,
}


def claims(descriptor: Descriptor) -> set[str]:
    """Fields that are numbers or lists."""
    return {field.name for field in descriptor.fields if field.is_repeated or field.type in (*HIGHEST, *FLOATS)}


@pytest.mark.parametrize("name", MESSAGES)
def test_every_number_and_every_list_of_a_message_has_a_rule(name: str) -> None:
    parts = {field.name for field in MESSAGES[name].fields if field.message_type is not None}
    rules = MESSAGE_BOUNDS.get(name, {})
    assert claims(MESSAGES[name]) <= set(rules), "wire/bounds: a number or list without a rule"
    assert set(rules) <= claims(MESSAGES[name]) | parts, "wire/bounds: a rule of no number or list"


def test_a_table_of_no_message_is_found() -> None:
    assert set(MESSAGE_BOUNDS) <= set(MESSAGES)


def test_whoever_checks_a_number_is_there() -> None:
    rules = [rule for table in MESSAGE_BOUNDS.values() for rule in table.values()]
    rules += [rule.each for rule in rules if isinstance(rule, Most) and rule.each is not None]
    for rule in rules:
        if isinstance(rule, Checked):
            module, _, path = rule.by.partition(":")
            found: Any = importlib.import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
            assert callable(found), rule.by
        elif isinstance(rule, Harmless):
            assert rule.why


def beyond(field: FieldDescriptor, bound: Within) -> Sequence[float]:
    """Numbers of the field's type that the bound forbids."""
    if field.type in FLOATS:
        return [float("nan"), float("inf"), float("-inf"), 2 * bound.highest, 2 * bound.lowest - 1]
    highest = HIGHEST[field.type]
    above = [each for each in (int(bound.highest) + 1, highest) if bound.highest < each <= highest]
    return above + ([int(bound.lowest) - 1] if bound.lowest > 0 else [])


def valid(descriptor: Descriptor) -> Message:
    """A message with the least number that each rule allows."""
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        rule = MESSAGE_BOUNDS.get(descriptor.name, {}).get(field.name)
        if isinstance(rule, Within) and rule.lowest > 0:
            setattr(message, field.name, int(rule.lowest))
    return message


def refused(name: str) -> Iterator[tuple[FieldDescriptor, Message]]:
    """Messages of one kind with one field beyond its rule."""
    for field in MESSAGES[name].fields:
        rule = MESSAGE_BOUNDS.get(name, {}).get(field.name)
        bound = rule.each if isinstance(rule, Most) else rule
        for number in beyond(field, bound) if isinstance(bound, Within) else ():
            message = valid(MESSAGES[name])
            if field.is_repeated:
                getattr(message, field.name).append(number)
            else:
                setattr(message, field.name, number)
            yield field, message
        if isinstance(rule, Most):
            message = valid(MESSAGES[name])
            values: Any = getattr(message, field.name)
            for _ in range(rule.count + 1):
                if field.message_type is not None:
                    values.add()
                else:
                    values.append("" if field.type == FieldDescriptor.TYPE_STRING else 0)
            yield field, message


@pytest.mark.parametrize("name", MESSAGES)
def test_what_a_rule_forbids_is_refused_by_the_fields_name(name: str) -> None:
    check_numbers(valid(MESSAGES[name]))
    for field, message in refused(name):
        with pytest.raises(RemoteProtocolError, match=rf"{name}\.{field.name} "):
            check_numbers(message)


@pytest.mark.parametrize("name", MESSAGES)
def test_what_a_rule_forbids_is_refused_inside_other_messages(name: str) -> None:
    bad = next((message for _, message in refused(name)), None)
    for outer in MESSAGES.values():
        for field in outer.fields:
            if bad is None or field.message_type is not MESSAGES[name]:
                continue
            if isinstance(MESSAGE_BOUNDS.get(outer.name, {}).get(field.name), Checked):
                continue  # that function checks it
            message = valid(outer)
            part: Any = getattr(message, field.name)
            (part.add() if field.is_repeated else part).CopyFrom(bad)
            with pytest.raises(RemoteProtocolError):
                check_numbers(message)
