"""Copies beside computing: they wait for a step that uses what they copy, for no other, and the next step waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from edgepipe_torch import TorchBackend  # noqa: E402
from edgepipe_torch.cuda.moving import CudaPins, SideStream  # noqa: E402
from edgepipe_torch.layers.host_copies import HostCopies, HostMover, Stored, uses_moved  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from edgepipe.backend.host_places import PinningFailed  # noqa: E402
from edgepipe.backend.step_layout import lay_out_step  # noqa: E402
from edgepipe.backend.types import (  # noqa: E402
    BackendOptions,
    BlockCopy,
    BlockRun,
    RowState,
    StateWrite,
    StepRow,
    TierMove,
    WindowRuns,
)
from edgepipe.spec.facts import LayerRange, make_slices  # noqa: E402
from edgepipe.testing.tiny_model import TinyWeights, tiny_config  # noqa: E402
from tests.support.backends.steps import make_step, step_row, token_ids  # noqa: E402
from tests.support.backends.torch_paging import CudaOnHost, cpu_paging  # noqa: E402

SIZE = 4  # tokens per block
CARD = torch.device("cuda", 1)


@dataclass
class FakeCuda:
    """Streams and pinning without a card. ``told`` lists the calls in order; ``refuses`` is the error of each pin."""

    told: list[str] = field(default_factory=list)
    refuses: int = 0
    streams: int = 0
    names: list[str] = field(default_factory=lambda: ["computing"])

    def stream(self, name: str) -> SimpleNamespace:
        """A stream of that name."""
        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: self.told.append(f"{name} waits for {other.name}"),
            synchronize=lambda: self.told.append(f"host waits for {name}"),
            record_event=lambda: self._mark(name),
        )

    def _mark(self, name: str) -> SimpleNamespace:
        self.told.append(f"{name} is marked")
        return SimpleNamespace(synchronize=lambda: self.told.append("host waits for mark"))

    def new_stream(self, place: Any) -> SimpleNamespace:
        """``torch.cuda.Stream``."""
        assert place == CARD
        self.streams += 1
        return self.stream("side")

    @contextmanager
    def on(self, stream: SimpleNamespace) -> Iterator[None]:
        """``torch.cuda.stream``."""
        self.told.append(f"on {stream.name}")
        yield
        self.told.append(f"off {stream.name}")

    @contextmanager
    def device(self, place: Any) -> Iterator[None]:
        """``torch.cuda.device``."""
        self.told.append(f"device {place}")
        yield

    def cudart(self) -> SimpleNamespace:
        """``torch.cuda.cudart``."""
        return SimpleNamespace(
            cudaHostRegister=lambda address, size, flags: self._pin(address, size, flags),
            cudaHostUnregister=lambda address: self.told.append(f"unpin {address}") or 0,
        )

    def _pin(self, address: int, size: int, flags: int) -> int:
        self.told.append(f"pin {address} {size} {flags}")
        return self.refuses


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "Stream", fake.new_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda place: fake.stream("computing"))
    monkeypatch.setattr(torch.cuda, "stream", fake.on)
    monkeypatch.setattr(torch.cuda, "device", fake.device)
    monkeypatch.setattr(torch.cuda, "cudart", fake.cudart)
    return fake


def test_copies_that_touch_nothing_in_use_begin_at_once(cuda: FakeCuda) -> None:
    mover = SideStream(CARD)
    mover.wait()
    with mover.copying(at_once=True, beside=False):
        cuda.told.append("copies")
    assert cuda.told == ["on side", "copies", "off side", "computing waits for side"]
    mover.wait()
    assert cuda.told[4:] == ["host waits for side"]


def test_a_step_that_uses_none_of_the_copies_does_not_wait_for_them(cuda: FakeCuda) -> None:
    """Its end does, and so does the next step."""
    mover = SideStream(CARD)
    with mover.copying(at_once=True, beside=True):
        cuda.told.append("copies")
    mark = mover.mark()
    assert cuda.told == ["on side", "copies", "off side", "side is marked"]
    assert mark is not None
    mark.synchronize()
    assert cuda.told[4:] == ["host waits for mark"]
    for _ in range(2):
        mover.end_beside()
    assert cuda.told[5:] == ["computing waits for side"]
    assert mover.mark() is None


def test_other_copies_wait_for_the_submitted_steps(cuda: FakeCuda) -> None:
    mover = SideStream(CARD)
    for _ in range(2):
        cuda.told.clear()
        with mover.copying(at_once=False, beside=False):
            cuda.told.append("copies")
        assert cuda.told == [
            "side waits for computing",
            "on side",
            "copies",
            "off side",
            "computing waits for side",
        ]
    assert cuda.streams == 1


def test_places_are_pinned_on_the_stage_s_device_and_only_once(cuda: FakeCuda) -> None:
    stored = [Stored(0, torch.arange(64.0).view(16, 4), 0, SIZE), Stored(0, torch.arange(16).view(1, 16), 1, SIZE)]
    before = [each.tensor.clone() for each in stored]
    copies = HostCopies(stored, (2,), SideStream(CARD))
    out = [TierMove(0, 3, 1, True), TierMove(0, 0, 0, True)]
    copies.move(out, ())
    for each in stored:
        each.tensor.zero_()
    copies.move([TierMove(0, 2, 1, False), TierMove(0, 1, 0, False)], ())
    for each, old in zip(stored, before, strict=True):
        moved = each.tensor.narrow(each.axis, SIZE, 2 * SIZE)
        kept = torch.cat([old.narrow(each.axis, 0, SIZE), old.narrow(each.axis, 3 * SIZE, SIZE)], each.axis)
        assert torch.equal(moved, kept)
    pins = [each.split() for each in cuda.told if each.startswith("pin ")]
    assert len(pins) == 2, "the way back finds them pinned"
    first, second = sorted(int(pin[1]) for pin in pins)
    assert {(int(pin[2]), pin[3]) for pin in pins} == {(second - first, "0")}
    copies.close()
    assert cuda.told[-5:] == [
        "host waits for side",
        "device cuda:1",
        f"unpin {first}",
        "device cuda:1",
        f"unpin {second}",
    ]


def test_a_device_that_pins_nothing_more_has_its_error_taken_away(cuda: FakeCuda) -> None:
    """Otherwise torch would raise it behind the next kernel that it starts."""
    cuda.refuses = 2
    cleared: list[Any] = []
    pins = CudaPins(CARD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "zeros", lambda count, *, device: cleared.append(device))
        with pytest.raises(PinningFailed, match="error 2"):
            pins.pin(memoryview(bytearray(8)))
    assert cleared == [CARD]


# Rows at positions in blocks, so that a table's length is that of its tokens.
_TABLES = st.lists(st.integers(0, 11), min_size=1, max_size=3, unique=True)
_MOVES = st.lists(
    st.builds(TierMove, st.integers(0, 2), st.integers(0, 11), st.integers(0, 5), st.booleans()), min_size=1, max_size=3
)


@given(
    tables=st.lists(_TABLES, min_size=1, max_size=2),
    windows=st.lists(_TABLES, min_size=2, max_size=2),
    slots=st.lists(st.integers(0, 11), min_size=4, max_size=4, unique=True),
    copies=st.lists(st.builds(BlockCopy, st.integers(0, 11), st.integers(0, 11)), max_size=1),
    moves=_MOVES,
)
def test_a_step_uses_what_its_rows_states_and_copies_name(
    tables: list[list[int]],
    windows: list[list[int]],
    slots: list[int],
    copies: list[BlockCopy],
    moves: list[TierMove],
) -> None:
    used = {(0, block) for table in tables for block in table}
    used |= {(0, block) for copy in copies for block in (copy.source, copy.target)}
    rows: list[StepRow] = []
    for number, (table, window) in enumerate(zip(tables, windows, strict=False)):
        used |= {(1, block) for block in window}
        read, write = slots[2 * number : 2 * number + 2]
        used |= {(2, read), (2, write)}
        count = SIZE * min(len(table), len(window))
        row = step_row(SIZE * len(table) - count, count, *((block, 1) for block in table), sequence=number + 1)
        held = WindowRuns(len(table) - len(window), tuple(BlockRun(block, 1) for block in window))
        state = RowState(read if row.position else None, (StateWrite(count, write),))
        if not row.position:
            used.discard((2, read))
        rows.append(replace(row, windows=(held,), state=state))
    step = replace(make_step(rows), copies=tuple(copies))
    layout = lay_out_step(step, block_size=SIZE, num_blocks=12, window_blocks=(12,), state_slots=12, dtype=np.int64)
    assert uses_moved(layout, moves) == any((move.number, move.place) in used for move in moves)


class Noted(HostMover):
    """Notes which copies need not wait."""

    def __init__(self) -> None:
        self.at_once: list[bool] = []
        self.beside: list[bool] = []

    def copying(self, *, at_once: bool, beside: bool):
        """See ``Mover``."""
        self.at_once.append(at_once)
        self.beside.append(beside)
        return super().copying(at_once=at_once, beside=beside)


def test_a_stage_s_copies_wait_for_the_one_step_that_may_still_compute() -> None:
    """Of two submitted steps, the older one is done before a third comes."""
    noted = Noted()
    device = CudaOnHost(paging=cpu_paging(page_tokens=16), mover=noted)
    backend = TorchBackend(BackendOptions(), device=device)
    config = tiny_config()
    (whole,) = make_slices([LayerRange(0, config.num_layers)], config.num_layers)
    backend.load([whole], TinyWeights(config), lambda _progress: None)
    backend.allocate_kv(num_blocks=6, block_size=16, host_places=(4,))
    steps = [(0, ()), (2, ((0, True),)), (4, ((2, True),)), (2, ((0, False),)), (3, ((3, False),))]
    tickets: list[object] = []
    for number, (block, moved) in enumerate(steps):
        step = make_step([step_row(0, 16, (block, 1), sequence=number + 1)], step=number + 1)
        moves = tuple(TierMove(0, place, 0, out) for place, out in moved)
        tickets.append(backend.submit(backend.prepare(replace(step, moves=moves)), token_ids(range(16))))
    assert noted.at_once == [False, False, True, True]
    assert noted.beside == [True, True, True, False]
    backend.close()
