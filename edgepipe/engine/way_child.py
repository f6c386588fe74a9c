"""Compare the ways to fill steps of a batch: ``python -m edgepipe.engine.way_child``.

A child process does it: the simulations take some seconds of processor time, in which the engine has steps to send. A
question (``edgepipe.children.frames``) is JSON, ``{"facts", "current"}``; the answer is ``{"way", "rates"}``.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Any

from edgepipe.children.frames import answer_frames
from edgepipe.scheduler.lengths import Lengths
from edgepipe.simulation.batch_choice import ChoiceFacts, DeviceSketch, RingSketch, choose_way

MODULE = "edgepipe.engine.way_child"
_NICE = 10


def question_for(facts: ChoiceFacts, current: str) -> bytes:
    """Build the question for the child."""
    return json.dumps({"facts": asdict(facts), "current": current}).encode()


def answer(question: bytes) -> bytes:
    """Answer one question."""
    asked: dict[str, Any] = json.loads(question)
    way, rates = choose_way(_facts(asked["facts"]), asked["current"])
    return json.dumps({"way": way, "rates": dict(rates)}).encode()


def _facts(values: dict[str, Any]) -> ChoiceFacts:
    ring: dict[str, Any] = values.pop("ring")
    lengths = tuple(Lengths(*each) for each in values.pop("lengths"))
    sketch = RingSketch(
        devices=tuple(_device(each) for each in ring["devices"]),
        upload_token_s=tuple(ring["upload_token_s"]),
        latency_s=ring["latency_s"],
    )
    return ChoiceFacts(ring=sketch, lengths=lengths, **values)


def _device(values: dict[str, Any]) -> DeviceSketch:
    decode_s, chunk_s = (tuple(values.pop(name)) for name in ("decode_s", "chunk_s"))
    return DeviceSketch(decode_s=decode_s, chunk_s=chunk_s, **values)


if __name__ == "__main__":
    os.nice(_NICE)  # steps go first
    answer_frames(answer)
