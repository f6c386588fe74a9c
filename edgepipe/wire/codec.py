"""Conversion between values (frozen dataclasses) and protobuf messages whose fields have the same names.

A field of a dataclass is converted by its annotation:

- numbers, texts, bytes and their ``NewType``s as they are;
- ``tuple[X, ...]``: a repeated field;
- a dataclass: a message; ``EdgepipeError``: an ``Error``;
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
from typing import Any, NewType, TypeVar

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from edgepipe.errors import EdgepipeError, RemoteProtocolError
from edgepipe.wire.bounds import check_numbers
from edgepipe.wire.errors import error_from_wire, error_to_wire

V = TypeVar("V")
M = TypeVar("M", bound=Message)

_Read = Callable[[Message], Any]  # a field's value in a message
_Write = Callable[[Message, Any], None]  # set a field of a message
_Convert = Callable[[Any], Any]


def from_wire(message: Message, kind: type[V]) -> V:
    """Return a received message as a value.

    Raises RemoteProtocolError, also for numbers beyond ``MESSAGE_BOUNDS``, and what ``kind`` raises for impossible
    values.
    """
    check_numbers(message)
    return _value(message, kind)


def _value(message: Message, kind: type[V]) -> V:
    """Return a checked message as a value."""
    return kind(**{name: read(message) for name, (read, _) in _plan(kind, message.DESCRIPTOR).items()})


def to_wire(value: object, kind: type[M]) -> M:
    """Return a value as a message. Raises ValueError for a number that does not fit."""
    message = kind()
    for name, (_, write) in _plan(type(value), kind.DESCRIPTOR).items():
        write(message, getattr(value, name))
    return message


@cache
def _plan(kind: type[Any], descriptor: Descriptor) -> dict[str, tuple[_Read, _Write]]:
    """Return how each field is read and written. Raises TypeError if the two do not fit together."""
    hints = typing.get_type_hints(kind)
    return {field.name: _field(field.name, hints[field.name], descriptor) for field in dataclasses.fields(kind)}


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
        return tuple(map(read, getattr(message, name)))

    def write_field(message: Message, value: Any) -> None:
        getattr(message, name).extend(map(write, value))

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
    if hint is EdgepipeError:
        return error_from_wire, error_to_wire
    if wire.enum_type is not None:
        return _enum(hint, wire.enum_type)
    if wire.message_type is not None:
        _plan(hint, wire.message_type)
        message_class = GetMessageClass(wire.message_type)
        return partial(_value, kind=hint), partial(to_wire, kind=message_class)
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
