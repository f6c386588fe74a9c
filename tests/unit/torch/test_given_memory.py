"""Host memory in pieces: the system gets whole pages back, and the other pieces keep what they hold."""

from __future__ import annotations

import mmap
import sys

import pytest
import torch
from edgepipe_torch.layers.given_memory import GivenMemory

PIECE = 3 * mmap.PAGESIZE + 100


def test_other_pieces_keep_what_they_hold() -> None:
    memory = GivenMemory(8, PIECE)
    pieces = memory.tensor.view(8, PIECE)
    for place in range(8):
        pieces[place].fill_(place + 1)
    memory.give_back([6, 2, 3])
    assert [int(pieces[place].min()) for place in (0, 1, 4, 5, 7)] == [1, 2, 5, 6, 8]
    pieces[3].fill_(99)
    assert int(pieces[3].min()) == 99


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux frees the pages at once")
def test_the_system_has_the_pages_of_neighbours_as_one() -> None:
    memory = GivenMemory(8, PIECE)
    memory.tensor.fill_(7)
    memory.give_back([2, 3, 4])
    inner = memory.tensor[2 * PIECE + mmap.PAGESIZE : 5 * PIECE - mmap.PAGESIZE]
    assert torch.equal(inner, torch.zeros_like(inner))
    memory.give_back([])
    assert int(memory.tensor[: 2 * PIECE].min()) == 7


def test_memory_without_pieces_is_empty() -> None:
    memory = GivenMemory(0, PIECE)
    memory.give_back([])
    assert memory.tensor.numel() == 0
