"""Conversion between values (frozen dataclasses) and protobuf messages whose fields have the same names.

A field of a dataclass is converted by its annotation:

- numbers, texts, bytes and their ``NewType``s as they are;
- ``tuple[X, ...]``: a repeated field;
- a dataclass: a message; those of ``_BY_HAND``, such as ``EdgepipeError``, by a conversion of their own;
- an ``Enum``: the enumerator with the member's name behind the enumeration's prefix (``Moves.OFF``: ``MOVES_OFF``); an
  enumerator without a member is refused;
- ``X | None``: None where the message has no such field, or an empty value of a field without presence;
- ``A | B`` of dataclasses, in a field with the name of a oneof: the member whose message has the dataclass's name.

Fields of a message without a field in the dataclass are left out. Numbers and lists are checked against
``edgepipe.wire.bounds`` first; other conditions are checked where a value is used.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Iterable
from enum import Enum
from functools import cache, partial
from operator import attrgetter
from typing import Any, NamedTuple, NewType, TypeVar

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from edgepipe.errors import EdgepipeError, RemoteProtocolError
from edgepipe.sampling import SamplingParams, TokenLogprobs
from edgepipe.wire.bounds import check_numbers
from edgepipe.wire.errors import error_from_wire, error_to_wire
from edgepipe.wire.sampling import logprobs_from_wire, logprobs_to_wire, sampling_from_wire, sampling_to_wire

V = TypeVar("V")
M = TypeVar("M", bound=Message)

_Read = Callable[[Message], Any]  # a field's value in a message
_Write = Callable[[Message, Any], None]  # set a field of a message
_Convert = Callable[[Any], Any]

_BY_HAND: dict[Any, tuple[_Convert, _Convert]] = {
    EdgepipeError: (error_from_wire, error_to_wire),
    SamplingParams: (sampling_from_wire, sampling_to_wire),
    TokenLogprobs: (logprobs_from_wire, logprobs_to_wire),
}


class _Plan(NamedTuple):
    """How a dataclass and a message are converted."""

    same: tuple[str, ...]  # fields whose values are the same in both, copied together
    get_same: Callable[[Any], tuple[Any, ...]]
    others: dict[str, tuple[_Read, _Write]]


def from_wire(message: Message, kind: type[V]) -> V:
    """Return a received message as a value.

    Raises RemoteProtocolError, also for numbers beyond ``MESSAGE_BOUNDS``, and what ``kind`` raises for impossible
    values.
    """
    check_numbers(message)
    return value_of(message, kind)


def value_of(message: Message, kind: type[V]) -> V:
    """Return a checked message as a value."""
    plan = _plan(kind, message.DESCRIPTOR)
    values = dict(zip(plan.same, plan.get_same(message), strict=True))
    for name, (read, _) in plan.others.items():
        values[name] = read(message)
    return kind(**values)


def to_wire(value: object, kind: type[M]) -> M:
    """Return a value as a message. Raises ValueError for a number that does not fit."""
    plan = _plan(type(value), kind.DESCRIPTOR)
    message = kind(**dict(zip(plan.same, plan.get_same(value), strict=True)))
    for name, (_, write) in plan.others.items():
        write(message, getattr(value, name))
    return message


@cache
def _plan(kind: type[Any], descriptor: Descriptor) -> _Plan:
    """Return how the fields are read and written. Raises TypeError if the two do not fit together."""
    hints = {field.name: typing.get_type_hints(kind)[field.name] for field in dataclasses.fields(kind)}
    same = tuple(name for name, hint in hints.items() if _is_same(hint, descriptor.fields_by_name.get(name)))
    others = {name: _field(name, hint, descriptor) for name, hint in hints.items() if name not in same}

    def get_one_by_one(source: object) -> tuple[Any, ...]:
        return tuple(getattr(source, name) for name in same)

    return _Plan(same, attrgetter(*same) if len(same) > 1 else get_one_by_one, others)


def _is_same(hint: Any, wire: FieldDescriptor | None) -> bool:
    """Return whether a field is one number, text or bytes, also of a ``NewType``, in both."""
    while isinstance(hint, NewType):
        hint = hint.__supertype__
    plain = wire is not None and wire.enum_type is None and wire.message_type is None
    return plain and hint in (int, float, str, bytes, bool)


def _field(name: str, hint: Any, descriptor: Descriptor) -> tuple[_Read, _Write]:
    if name in descriptor.oneofs_by_name:
        return _oneof(name, hint, descriptor)
    wire = descriptor.fields_by_name.get(name)
    if wire is None:
        raise TypeError(f"{descriptor.name} has no field {name}")
    if typing.get_origin(hint) is tuple:
        return _repeated(wire, typing.get_args(hint)[0])
    inner, optional = _without_none(hint)
    read, write = _converters(inner, wire)
    if optional:
        return _optional(wire, read, write)

    def read_field(message: Message) -> Any:
        value = read(getattr(message, name))
        if value is None:
            raise RemoteProtocolError(f"the other side uses an unknown {name.replace('_', ' ')}")
        return value

    def write_field(message: Message, value: Any) -> None:
        _set(message, wire, write(value))

    return read_field, write_field


def _optional(wire: FieldDescriptor, read: _Convert, write: _Convert) -> tuple[_Read, _Write]:
    name = wire.name

    def read_field(message: Message) -> Any:
        if wire.has_presence:
            return read(getattr(message, name)) if message.HasField(name) else None
        return read(getattr(message, name)) or None

    def write_field(message: Message, value: Any) -> None:
        if value is not None:
            _set(message, wire, write(value))

    return read_field, write_field


def _repeated(wire: FieldDescriptor, hint: Any) -> tuple[_Read, _Write]:
    name = wire.name
    read, write = _converters(hint, wire)

    def read_field(message: Message) -> Any:
        values = getattr(message, name)
        return tuple(values) if read is _same else tuple(map(read, values))

    def write_field(message: Message, value: Any) -> None:
        getattr(message, name).extend(value if write is _same else map(write, value))

    return read_field, write_field


def _oneof(name: str, hint: Any, descriptor: Descriptor) -> tuple[_Read, _Write]:
    members, optional = _members(hint)
    fields = descriptor.oneofs_by_name[name].fields
    by_message = {field.message_type.name: field for field in fields if field.message_type is not None}
    readers, writers = dict[str, _Convert](), dict[type[Any], tuple[FieldDescriptor, _Convert]]()
    for member in members:
        field = by_message[_message_name(member)]
        read, write = _converters(member, field)
        readers[field.name], writers[member] = read, (field, write)

    def read_field(message: Message) -> Any:
        which = message.WhichOneof(name)
        if which in readers:
            return readers[which](getattr(message, which))
        if optional:
            return None
        raise RemoteProtocolError(f"the other side sent a {descriptor.name} of an unknown kind")

    def write_field(message: Message, value: Any) -> None:
        if value is not None:
            field, write = writers[EdgepipeError if isinstance(value, EdgepipeError) else type(value)]
            _set(message, field, write(value))

    return read_field, write_field


def _converters(hint: Any, wire: FieldDescriptor) -> tuple[_Convert, _Convert]:
    """Return the functions that read and write one value."""
    if isinstance(hint, NewType):
        return _converters(hint.__supertype__, wire)
    if hint in _BY_HAND:
        return _BY_HAND[hint]
    if wire.enum_type is not None:
        return _enum(hint, wire.enum_type)
    if wire.message_type is not None:
        _plan(hint, wire.message_type)
        message_class = GetMessageClass(wire.message_type)
        return partial(value_of, kind=hint), partial(to_wire, kind=message_class)
    if hint in (int, float, str, bytes, bool):
        return _same, _same
    raise TypeError(f"{wire.full_name} cannot be converted to {hint}")


def _enum(hint: Iterable[Enum], descriptor: EnumDescriptor) -> tuple[_Convert, _Convert]:
    prefix = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", descriptor.name).upper() + "_"
    members = {descriptor.values_by_name[prefix + member.name].number: member for member in hint}
    numbers = {member: number for number, member in members.items()}
    return members.get, numbers.__getitem__


def _set(message: Message, wire: FieldDescriptor, value: Any) -> None:
    if wire.message_type is not None:
        getattr(message, wire.name).CopyFrom(value)  # CopyFrom sets the field even where the value is empty
    else:
        setattr(message, wire.name, value)


def _members(hint: Any) -> tuple[list[Any], bool]:
    parts = list(typing.get_args(hint)) if _is_union(hint) else [hint]
    return [part for part in parts if part is not types.NoneType], types.NoneType in parts


def _without_none(hint: Any) -> tuple[Any, bool]:
    members, optional = _members(hint)
    if len(members) != 1:
        raise TypeError(f"{hint} is no oneof's")
    return members[0], optional


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _message_name(kind: type[Any]) -> str:
    return "Error" if kind is EdgepipeError else kind.__name__


def _same(value: Any) -> Any:
    return value
