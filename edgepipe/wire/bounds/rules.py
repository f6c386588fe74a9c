"""Kinds of rules for the numbers and lists of messages. ``edgepipe.wire.bounds`` has the tables.

A number from another process is a claim. Either its table refuses it beyond a bound as soon as the message enters, or
the rule names the function that compares it with the receiver's state, or the reason why any value is harmless.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edgepipe.sampling.bounds import Within


@dataclass(frozen=True, slots=True)
class Checked:
    """A number, list or part that a function compares with the receiver's state. The general check leaves it out."""

    by: str  # "module:qualified.name" below edgepipe


@dataclass(frozen=True, slots=True)
class Harmless:
    """A number or list that needs no bound."""

    why: str


@dataclass(frozen=True, slots=True)
class Most:
    """A list of at most ``count`` entries. Its numbers follow ``each``; entries that are messages have own tables."""

    count: int
    each: Within | Checked | Harmless | None = None


Rule = Within | Most | Checked | Harmless
Rules = Mapping[str, Rule]  # rule of each field
Tables = Mapping[str, Rules]  # rules of each message

EXACT = (1 << 53) - 1  # largest integer that every JSON reader and every float64 keeps exactly
WIRE_MAX = (1 << 32) - 1  # largest uint32

COUNT = Within(0, EXACT)  # events, versions, milliseconds and microseconds of clocks
BYTES = Within(0, 1 << 60)
RATE = Within(0.0, 1e18)  # bytes, tokens or operations per second
SECONDS = Within(0.0, 1e9)
MEASURED = Within(-1e15, 1e15)  # this machine's own measurements, which clocks apart can make negative
SHARE = Within(0.0, 1.0)
PORT = Within(0, 65_535)
PERCENT = Within(0, 100)
TOKENS = Within(0, 1 << 31)  # tokens of a context or a KV pool: sums stay within 64 bits
LAYERS = Within(0, 1 << 16)
BLOCK = Within(0, 1 << 16)  # tokens
BLOCKS = Within(0, 1 << 24)  # an engine keeps 40 bytes for each
NODES = Within(0, 1 << 12)
CHATS = Within(0, 1 << 20)

NAMES = Most(4096)  # names of nodes, models or pipelines
FEW = Most(256)

SHOWN = Harmless("it is shown to people and never counted with")
BY_SIZE = Harmless("the message's 4 MiB bound it, and it is read through once")
EQUAL = Harmless("it is only compared for equality")
