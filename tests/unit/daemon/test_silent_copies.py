"""A node that was asked for a copy and goes silent: the others' copies do not wait for it all day."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edgepipe.daemon.serving.replication import Replication
from edgepipe.errors import SendTimeout
from edgepipe.ids import NodeId
from edgepipe.wire.children import PrepareProgress
from edgepipe.wire.serving import CopyProgress, KeepCopyRequest
from tests.support.engine.virtual_ring import in_virtual_time

NODE = NodeId("b")


def copied(pauses_s: list[float]) -> int:
    """The bytes of a copy that reports a byte after each pause, and then nothing."""

    async def keep_copy(*_: object) -> AsyncGenerator[PrepareProgress]:
        for done, pause_s in enumerate(pauses_s, start=1):
            await asyncio.sleep(pause_s)
            yield PrepareProgress(bytes_done=done)

    none: dict[str, Any] = dict.fromkeys(("models", "engines", "local"))
    replication = Replication(peers=cast("Any", SimpleNamespace(keep_copy=keep_copy)), copies=2, **none)
    progress = {NODE: CopyProgress(node_id=NODE, node_name="b", bytes_total=len(pauses_s))}
    request = KeepCopyRequest(model="m", manifest_hash="h", parts=(0,), source="a")
    in_virtual_time(replication._copy_to(NODE, request, progress))
    return progress[NODE].bytes_done


def test_a_slow_copy_goes_on_and_a_silent_one_ends() -> None:
    assert copied([500.0] * 100) == 100
    with pytest.raises(SendTimeout, match="b makes no progress") as caught:
        copied([1.0, 86_400.0])
    assert caught.value.fact == "silent for 600 s"
