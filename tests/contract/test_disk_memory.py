"""Conversations go to host memory, to the disk and back, on every backend: nothing is computed otherwise."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgepipe.backend.protocol import Backend, DiskBackend, HostMemoryBackend
from edgepipe.backend.types import BlockRun, RowState, StateWrite, StepRow, TierMove, WindowRuns
from edgepipe.ids import EngineId, Epoch
from edgepipe.spec.facts import ModelConfig
from edgepipe.stage.disk_tier import DiskTier
from edgepipe.system import SystemClock
from edgepipe.testing.tiny_model import tiny_config
from edgepipe.wire.tiers import DiskCopied, DiskCopies
from tests.contract.test_windowed_kv import windowed
from tests.support.backends.maker import Maker
from tests.support.backends.steps import make_step, run_step, step_row, token_ids
from tests.support.models.recurrent_layers import MODELS

CHATS, KNOWN, MORE = 3, 32, 4  # whole blocks, and the tokens behind them
CHAT_IDS = [np.random.default_rng(20 + chat).integers(1, 31, KNOWN + MORE).tolist() for chat in range(CHATS)]
STATES = next(iter(MODELS))


def model_of(name: str) -> ModelConfig:
    return {"context": tiny_config, "windows": windowed, "states": lambda: MODELS[STATES]}[name]()


class Chats:
    """Chats that follow one another on a device with room for one of them, as host memory has."""

    def __init__(self, maker: Maker, model: ModelConfig, folder: Path) -> None:
        self._windows, self._states = any(layer.window for layer in model.layers), bool(model.state_bytes())
        self._blocks = -(-(KNOWN + MORE) // maker.block_size)
        self._kept = KNOWN // maker.block_size or 1
        self._counts = [self._kept] * (1 + self._windows) + [1] * self._states  # what a chat has of each class
        self.backend = self._allocated(maker, model, self._counts)
        assert isinstance(self.backend, DiskBackend)
        places = [CHATS * count for count in self._counts]
        self.disk = DiskTier(
            self.backend, folder, host_places=self._counts, disk_places=places, clock=SystemClock(), late_s=60.0
        )
        self._whole = self._allocated(maker, model, ())
        self._step = 0

    def _allocated(self, maker: Maker, model: ModelConfig, host_places: Sequence[int]) -> Backend:
        backend = maker.loaded(model)
        if not isinstance(backend, DiskBackend):
            pytest.skip("this backend has no disk below host memory")
        backend.allocate_kv(
            num_blocks=self._blocks,
            block_size=maker.block_size,
            window_blocks=(self._blocks,) if self._windows else (),
            state_slots=1 if self._states else 0,
            host_places=tuple(host_places),
        )
        return backend

    def begin(self, chat: int, *, leaves: bool) -> None:
        """Compute a chat's known tokens. ``leaves``: the chat before goes to host memory first."""
        self._run(self.backend, chat, 0, KNOWN, self._moves(out=True) if leaves else ())

    def expected(self, chat: int) -> np.ndarray:
        """Return what the chat's further tokens give where nothing leaves the device."""
        self._run(self._whole, chat, 0, KNOWN)
        return self._run(self._whole, chat, KNOWN, MORE)

    def go_on(self, chat: int) -> np.ndarray:
        """Bring the chat from host memory, and compute its further tokens."""
        return self._run(self.backend, chat, KNOWN, MORE, self._moves(out=False))

    async def copy(self, chat: int, *, out: bool) -> list[DiskCopied]:
        """Copy host memory to the chat's places on disk, or back."""
        done: list[DiskCopied] = []
        for number, count in enumerate(self._counts):
            copies = DiskCopies(
                epoch=Epoch(1, EngineId("e")),
                number=1,
                memory_class=number,
                out=out,
                host_places=tuple(range(count)),
                disk_places=tuple(chat * count + place for place in range(count)),
            )
            done.append(await self.disk.perform(copies))
        return done

    def spoil(self) -> None:
        """Let the system have host memory, so that nothing of a chat is left there."""
        assert isinstance(self.backend, HostMemoryBackend)
        for number, count in enumerate(self._counts):
            self.backend.give_back(number, range(count))

    def _moves(self, *, out: bool) -> tuple[TierMove, ...]:
        return tuple(
            TierMove(number, place, place, out) for number, count in enumerate(self._counts) for place in range(count)
        )

    def _run(
        self, backend: Backend, chat: int, position: int, count: int, moves: tuple[TierMove, ...] = ()
    ) -> np.ndarray:
        self._step += 1
        step = make_step([self._row(chat, position, count)], step=self._step)
        return run_step(backend, replace(step, moves=moves), token_ids(CHAT_IDS[chat][position : position + count]))

    def _row(self, chat: int, position: int, count: int) -> StepRow:
        row = step_row(position, count, (0, self._blocks), sequence=chat + 1)
        if self._windows:
            row = replace(row, windows=(WindowRuns(0, (BlockRun(0, self._blocks),)),))
        return replace(row, state=RowState(0 if position else None, (StateWrite(count, 0),))) if self._states else row


@pytest.mark.parametrize("name", ["context", "windows", "states"])
async def test_chats_that_lay_on_disk_go_on_as_if_they_had_stayed(maker: Maker, tmp_path: Path, name: str) -> None:
    chats = Chats(maker, model_of(name), tmp_path / "kv")
    chats.begin(0, leaves=False)
    for chat in range(CHATS):
        chats.begin((chat + 1) % CHATS, leaves=True)
        assert [done.failed for done in await chats.copy(chat, out=True)] == [()] * (1 + (name != "context"))
    chats.spoil()
    for chat in (1, 0, 2, 1):
        assert all(not done.failed and not done.problem for done in await chats.copy(chat, out=False))
        maker.assert_same(chats.go_on(chat), chats.expected(chat))
    await chats.disk.close()


async def test_a_copy_that_was_changed_on_disk_never_reaches_host_memory(maker: Maker, tmp_path: Path) -> None:
    chats = Chats(maker, model_of("context"), tmp_path / "kv")
    chats.begin(0, leaves=False)
    chats.begin(1, leaves=True)
    await chats.copy(0, out=True)
    os.pwrite(chats.disk._file._file, b"changed", 100)  # pyright: ignore
    (done,) = await chats.copy(0, out=False)
    assert done.failed == (0,)
    maker.assert_same(chats.go_on(0), chats.expected(0))
    await chats.disk.close()
