"""Bounds of every number and list in the messages between processes, and the check of a received message.

A message is checked where it becomes a value: in ``codec.from_wire`` or in its own function ``..._from_wire``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from operator import attrgetter, ge, le
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from edgepipe.errors import RemoteProtocolError
from edgepipe.sampling.bounds import Within
from edgepipe.wire.bounds.common import COMMON
from edgepipe.wire.bounds.engine import ENGINE
from edgepipe.wire.bounds.node import NODE
from edgepipe.wire.bounds.rules import Checked, Most, Tables
from edgepipe.wire.bounds.stage import STAGE
from edgepipe.wire.bounds.trust import TRUST

MESSAGE_BOUNDS: Tables = {**COMMON, **ENGINE, **STAGE, **NODE, **TRUST}
"""Rules by message and field, for every number, every list, and every part that has a check of its own. A message
without any of them has no entry."""

_Check = Callable[[Message], None]
_FLOATS = (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE)  # NaN has no place among the others


def check_numbers(message: Message) -> None:
    """Check a message against its table, and its parts against theirs.

    Raises RemoteProtocolError that names the first field beyond its bound.
    """
    _run(_checks(message.DESCRIPTOR), message)


def _run(checks: Sequence[_Check], message: Message) -> None:
    for check in checks:
        check(message)


@cache
def _checks(descriptor: Descriptor) -> tuple[_Check, ...]:
    """Return the checks of a message; none if no value of any field needs one."""
    rules = MESSAGE_BOUNDS.get(descriptor.name, {})
    checks: list[_Check] = []
    numbers: list[tuple[FieldDescriptor, Within]] = []
    for field in descriptor.fields:
        rule = rules.get(field.name)
        if isinstance(rule, Most):
            checks.append(partial(_check_count, field, rule.count))
        if field.message_type is not None:
            if not isinstance(rule, Checked) and (own := _checks(field.message_type)):
                checks.append(partial(_check_parts if field.is_repeated else _check_part, field, own))
        elif isinstance(bound := rule.each if isinstance(rule, Most) else rule, Within):
            if field.is_repeated:
                checks.append(partial(_check_column, field, bound))
            else:
                numbers.append((field, bound))
    if len(numbers) > 1:
        checks.append(_numbers_check(numbers))
    else:
        checks += [partial(_check_number, field, bound) for field, bound in numbers]
    return tuple(checks)


def _numbers_check(numbers: Sequence[tuple[FieldDescriptor, Within]]) -> _Check:
    """Return a check of all single numbers of a message. It runs for every step: it compares without a Python loop."""
    get = attrgetter(*[field.name for field, _ in numbers])
    lowest, highest = [bound.lowest for _, bound in numbers], [bound.highest for _, bound in numbers]

    def check(message: Message) -> None:
        values: tuple[float, ...] = get(message)
        if not (all(map(le, lowest, values)) and all(map(ge, highest, values))):
            for field, bound in numbers:
                _check_number(field, bound, message)

    return check


def _check_number(field: FieldDescriptor, bound: Within, message: Message) -> None:
    value: float = getattr(message, field.name)
    if not bound.lowest <= value <= bound.highest:
        raise _beyond(field, bound.fault(value, None))


def _check_column(field: FieldDescriptor, bound: Within, message: Message) -> None:
    """Check each number of a list. Whole numbers are compared without a Python loop, as many are in every plan."""
    values: Sequence[float] = getattr(message, field.name)
    whole = field.cpp_type not in _FLOATS
    if not values or (whole and bound.lowest <= min(values) and max(values) <= bound.highest):
        return
    for value in values:
        if not bound.lowest <= value <= bound.highest:
            raise _beyond(field, bound.fault(value, None))


def _check_count(field: FieldDescriptor, most: int, message: Message) -> None:
    values: Sequence[Any] = getattr(message, field.name)
    if len(values) > most:
        raise _beyond(field, f"it has {len(values)} entries; at most {most} can be used")


def _check_part(field: FieldDescriptor, checks: Sequence[_Check], message: Message) -> None:
    if message.HasField(field.name):
        _run(checks, getattr(message, field.name))


def _check_parts(field: FieldDescriptor, checks: Sequence[_Check], message: Message) -> None:
    for part in getattr(message, field.name):
        _run(checks, part)


def _beyond(field: FieldDescriptor, fact: str) -> RemoteProtocolError:
    name = field.full_name.removeprefix("edgepipe.wire.v1.")
    return RemoteProtocolError(f"{name} of the other side cannot be used", fact=fact)
