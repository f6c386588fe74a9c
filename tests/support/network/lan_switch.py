"""An Ethernet switch in user space: frames between TAP devices, delayed, slowed, lost or cut per directed link."""

from __future__ import annotations

import heapq
import itertools
import math
import os
import random
import select
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, TypedDict, Unpack

_MAX_FRAME_BYTES = 65_536
_BURST_FRAMES = 64  # read from one port before the others get their turn
_GROUP_BIT = 1  # bit of a destination's first byte: broadcast and multicast


@dataclass(frozen=True, slots=True, kw_only=True)
class CableShape:
    """What a directed link does to frames."""

    delay_s: float = 0.0  # propagation, one way
    jitter_s: float = 0.0  # added to the delay, evenly from 0; frames keep their order
    bytes_per_s: float = math.inf  # rate of frames, headers included
    loss: float = 0.0  # share of frames that vanish
    cut: bool = False  # everything vanishes, what is under way too
    queue_bytes: int = 1_000_000  # waiting for the rate; frames beyond are dropped


class ShapeChanges(TypedDict, total=False):
    """The fields of ``CableShape`` that a change names."""

    delay_s: float
    jitter_s: float
    bytes_per_s: float
    loss: float
    cut: bool
    queue_bytes: int


class DirectedLink:
    """The way from one port to another. Any thread may change its shape at any time; frames sent from then on obey."""

    def __init__(self, shape: CableShape, *, seed: int = 0) -> None:
        self.shape = shape
        self.frames_delivered = 0
        self.bytes_delivered = 0
        self.frames_dropped = 0
        self.num_cuts = 0  # so far; a frame whose link was cut since it entered is lost
        self._random = random.Random(seed)
        self._sent_at_s = 0.0  # when the last frame's last byte has left
        self._arrives_at_s = 0.0

    def change(self, **changes: Unpack[ShapeChanges]) -> None:
        """Change some fields of the shape."""
        self.num_cuts += changes.get("cut", False)
        self.shape = replace(self.shape, **changes)

    def admit(self, now_s: float, num_bytes: int) -> float | None:
        """When a frame that enters now arrives; None if it is lost."""
        shape = self.shape
        waiting_bytes = max(0.0, self._sent_at_s - now_s) * shape.bytes_per_s if shape.bytes_per_s < math.inf else 0.0
        if shape.cut or waiting_bytes > shape.queue_bytes or (shape.loss and self._random.random() < shape.loss):
            self.frames_dropped += 1
            return None
        self._sent_at_s = max(now_s, self._sent_at_s) + num_bytes / shape.bytes_per_s
        delay_s = shape.delay_s + (self._random.random() * shape.jitter_s if shape.jitter_s else 0.0)
        self._arrives_at_s = max(self._arrives_at_s, self._sent_at_s + delay_s)
        return self._arrives_at_s


class UnderWay(NamedTuple):
    """A frame between two ports."""

    target: str
    link: DirectedLink
    num_cuts: int  # the link's when the frame entered
    frame: bytes


class Switch:
    """Moves frames on a thread of its own, so that a busy test does not slow the network.

    It learns addresses, floods groups and unknown ones, and never sends a frame back where it came from.
    """

    def __init__(self, ports: Mapping[str, int], links: Mapping[tuple[str, str], DirectedLink]) -> None:
        """``ports``: non-blocking TAP descriptors by name, owned by the caller; ``links``: one per ordered pair."""
        self._descriptors = dict(ports)
        self._names = {descriptor: name for name, descriptor in ports.items()}
        self._links = dict(links)
        self._learnt: dict[bytes, str] = {}
        self._under_way: list[tuple[float, int, UnderWay]] = []  # heap by arrival
        self._number = itertools.count()
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="lan-switch", daemon=True)

    def start(self) -> None:
        """Begin to move frames."""
        self._thread.start()

    def stop(self) -> None:
        """Stop; frames under way are lost. Raises RuntimeError if the thread does not end."""
        os.write(self._wake_write, b"\0")
        self._thread.join(timeout=5)
        if self._thread.is_alive():
            raise RuntimeError("the LAN switch does not stop")
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _run(self) -> None:
        """``select`` is the one wait whose timeout is finer than a millisecond."""
        readable = [self._wake_read, *self._names]
        while True:
            timeout_s = max(0.0, self._under_way[0][0] - time.monotonic()) if self._under_way else None
            ready, _, _ = select.select(readable, [], [], timeout_s)
            if self._wake_read in ready:
                return
            for descriptor in ready:
                if not self._receive(descriptor):
                    readable.remove(descriptor)
            self._deliver(time.monotonic())

    def _receive(self, descriptor: int) -> bool:
        """Take what a port has, up to a burst; False once the device is gone."""
        source = self._names[descriptor]
        try:
            for _ in range(_BURST_FRAMES):
                frame = os.read(descriptor, _MAX_FRAME_BYTES)
                self._learnt[frame[6:12]] = source
                self._forward(source, frame)
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True

    def _forward(self, source: str, frame: bytes) -> None:
        known = None if frame[0] & _GROUP_BIT else self._learnt.get(frame[:6])
        if known == source:
            return
        targets = [known] if known else [name for name in self._descriptors if name != source]
        now_s = time.monotonic()
        for target in targets:
            link = self._links[source, target]
            arrives_at_s = link.admit(now_s, len(frame))
            if arrives_at_s is None:
                continue
            entry = UnderWay(target, link, link.num_cuts, frame)
            if arrives_at_s <= now_s:
                self._write(entry)
            else:
                heapq.heappush(self._under_way, (arrives_at_s, next(self._number), entry))

    def _deliver(self, now_s: float) -> None:
        while self._under_way and self._under_way[0][0] <= now_s:
            self._write(heapq.heappop(self._under_way)[2])

    def _write(self, entry: UnderWay) -> None:
        link = entry.link
        try:
            if link.shape.cut or link.num_cuts != entry.num_cuts:
                raise BlockingIOError
            os.write(self._descriptors[entry.target], entry.frame)
        except OSError:  # cut meanwhile, the receiver's queue is full or its device is down: lost, as on a wire
            link.frames_dropped += 1
        else:
            link.frames_delivered += 1
            link.bytes_delivered += len(entry.frame)
