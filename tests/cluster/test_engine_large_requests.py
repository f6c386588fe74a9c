"""Requests that are large each, and many: messages stay within their bounds, and recovery goes on."""

from __future__ import annotations

from typing import Any

import pytest

from edgepipe.engine.control import StageControl
from edgepipe.errors import PeerClosed
from edgepipe.sampling import GrammarSpec, SamplingParams
from edgepipe.wire.sizes import PACKED_BYTES
from tests.support.engine.lab import EngineLab, engine_lab, submission

LARGE = GrammarSpec("%llguidance {}\nstart: /(.|\\n)*/\n// " + "x" * 200_000)


def break_stage(lab: EngineLab, index: int) -> None:
    """End the epoch there; the stage keeps its KV."""
    session = lab.stages.stages[index]._current  # pyright: ignore[reportPrivateUsage]
    assert session is not None
    session.fault(PeerClosed("the stage is shutting down"))


@pytest.fixture
def told_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of all messages to stages."""
    sizes: list[int] = []
    send = StageControl.send

    def measured(self: StageControl, messages: Any) -> None:
        sizes.extend(message.ByteSize() for message in messages)
        send(self, messages)

    monkeypatch.setattr(StageControl, "send", measured)  # a spy: it notes the sizes
    return sizes


async def test_chats_with_large_schemas_go_on_after_a_stage_was_lost(told_bytes: list[int]) -> None:
    params = SamplingParams(temperature=0.0, grammar=LARGE)
    names = [f"r{index}" for index in range(24)]
    async with engine_lab(max_blocks=512, micro_batches=1) as lab:
        gateway = await lab.gateway()
        gateway.send(*(submission(name, [index, 7, 7], 12, sampling=params) for index, name in enumerate(names)))
        for name in names:
            await gateway.has(name, 2)
        break_stage(lab, 1)
        for name in names:
            answer = await gateway.ended(name)
            assert answer.error is None
            assert len(answer.ids) == 12
        assert lab.engine.state().recoveries == 1
        assert max(told_bytes) <= PACKED_BYTES
