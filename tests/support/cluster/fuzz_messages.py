"""Messages that nobody would send, made from their descriptors: a new field is covered as soon as it is there."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import DecodeError, Message

from edgepipe.wire.v1 import engine_pb2, node_pb2, stage_pb2
from tests.support.cluster.pairing import damaged

_MAX_DEPTH = 6
_MAX_PARTS = 400  # messages in a message: one input takes a millisecond, not a second
_TEXTS = ("", "x", "node", "tiny", "\x1b[2J\n", "\u202e", "../../etc/passwd", "127.0.0.1:1", "ready", "0" * 64)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e308, -1e308, 5e-324, float("inf"), float("-inf"), float("nan"))
_BITS = {
    FieldDescriptor.TYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.TYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.TYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.TYPE_UINT64: (0, (1 << 64) - 1),
}
_EDGES = (0, 1, 1 << 16, 1 << 24, 1 << 31, 1 << 32, 1 << 53, 1 << 60, 1 << 63, 1 << 64)  # and one less, one more
_MOST_NEAR = 5000  # entries of a list that is as long as a number of the receiver's state

Near = Callable[[str], Sequence[int]]
"""Numbers of the receiver's state that a field is compared with, by the field's name."""


def nothing(_: str) -> Sequence[int]:
    """A receiver without state."""
    return ()


def methods() -> Mapping[str, MethodDescriptor]:
    """Every method of every service that listens on a network, as in ``edgepipe.security.access``."""
    files = (node_pb2, engine_pb2, stage_pb2)
    services = [service for file in files for service in file.DESCRIPTOR.services_by_name.values()]
    return {f"{service.name}/{method.name}": method for service in services for method in service.methods}


class MessageFuzzer:
    """Makes messages of one type: from nothing, from valid ones with some fields changed, from damaged bytes.

    Half of the numbers, and of the lengths of lists, are one less, as much or one more than a number of the receiver's
    state, or than an edge of some type of number.
    """

    def __init__(
        self, kind: Descriptor, samples: Sequence[Message], rng: random.Random, *, near: Near = nothing
    ) -> None:
        self._type: Callable[[], Message] = message_factory.GetMessageClass(kind)
        self._samples = samples
        self._near = near
        self._rng = rng
        self._parts = 0

    def message(self) -> Message:
        """The next one."""
        self._parts = 0
        kind = self._rng.random()
        if kind < 0.3 or not self._samples:
            made = self._type()
            self._fill(made, 0)
            return made
        made = self._type()
        made.CopyFrom(self._rng.choice(self._samples))
        if kind < 0.8:
            for _ in range(self._rng.choice((1, 1, 2, 5))):
                self._change(made, 0)
            return made
        try:
            return type(made).FromString(damaged(made.SerializeToString(), self._rng))
        except DecodeError:  # gRPC ends the call there
            return made

    def _fill(self, message: Message, depth: int) -> None:
        for field in fields_of(message):
            if self._rng.random() < 0.5:
                self._set(message, field, depth)

    def _change(self, message: Message, depth: int) -> None:
        """One field of the message or of a message in it."""
        rng = self._rng
        inner = [
            part
            for field, value in message.ListFields()
            if field.message_type is not None
            for part in (list(value)[:8] if field.is_repeated else [value])
        ]
        if inner and depth < _MAX_DEPTH and rng.random() < 0.7:
            self._change(rng.choice(inner), depth + 1)
        elif fields := fields_of(message):
            field = rng.choice(fields)
            if rng.random() < 0.2:
                message.ClearField(field.name)
            else:
                self._set(message, field, depth)

    def _set(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        if field.message_type is not None:
            if depth < _MAX_DEPTH and self._parts < _MAX_PARTS:
                self._set_message(message, field, depth)
            return
        if not field.is_repeated:
            setattr(message, field.name, self._value(field))
            return
        values: Any = getattr(message, field.name)
        if self._rng.random() < 0.3:
            del values[:]
        lengths = [max(0, each + step) for each in self._near(field.name) if each < _MOST_NEAR for step in (-1, 0, 1)]
        count = self._rng.choice((0, 1, 2, 7, 7, 1000) if not lengths or self._rng.random() < 0.5 else lengths)
        values.extend([self._value(field)] * count if count > 7 else [self._value(field) for _ in range(count)])

    def _set_message(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        count = self._rng.choice((1, 1, 2, 5, 50)) if field.is_repeated else 1
        for _ in range(count):
            self._parts += 1
            part: Any = getattr(message, field.name)
            if field.is_repeated:
                part = part.add()
            else:
                part.SetInParent()
            if self._parts < _MAX_PARTS:
                self._fill(part, depth + 1)

    def _value(self, field: FieldDescriptor) -> Any:
        rng = self._rng
        if field.type == FieldDescriptor.TYPE_BOOL:
            return rng.random() < 0.5
        if field.type == FieldDescriptor.TYPE_STRING:
            return rng.choice(_TEXTS) if rng.random() < 0.9 else "x" * rng.choice((300, 5000, 100_000))
        if field.type == FieldDescriptor.TYPE_BYTES:
            return rng.randbytes(rng.choice((0, 1, 16, 32, 32, 100, 5000)))
        if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
            return rng.choice(_FLOATS)
        if field.type == FieldDescriptor.TYPE_ENUM:
            return rng.choice((0, 1, 2, 77))
        low, high = _BITS[field.type]
        if rng.random() < 0.5:
            number = rng.choice([*self._near(field.name)] * 4 + [*_EDGES]) + rng.choice((-1, 0, 1))
            return min(max(low, number), high)
        return rng.choice((low, high, 0, 1, 2, 3, 7, 16, high // 2, rng.randint(low, high)))


def fields_of(message: Message) -> list[FieldDescriptor]:
    """The stubs name two classes, which are one."""
    return cast("list[FieldDescriptor]", list(message.DESCRIPTOR.fields))
