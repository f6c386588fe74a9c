"""What other programs take while a device is measured."""

from __future__ import annotations

import os
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.daemon.machine.machine_load import ProcessorTimes, others_share, processor_times


@pytest.mark.parametrize(
    ("idle_s", "own_s", "share"),
    [(2.0, 0.0, 0.0), (0.0, 2.0, 0.0), (0.0, 1.0, 0.5), (1.0, 0.0, 0.5), (0.5, 1.0, 0.25), (0.0, 3.0, 0.0)],
)
def test_what_neither_idles_nor_measures_is_others(idle_s: float, own_s: float, share: float) -> None:
    before = ProcessorTimes(total_s=100.0, idle_s=10.0, own_s=5.0)
    after = ProcessorTimes(total_s=102.0, idle_s=10.0 + idle_s, own_s=5.0 + own_s)
    assert others_share(before, after) == pytest.approx(share)


@given(st.floats(-10, 10), st.floats(-10, 10), st.floats(-10, 10))
def test_it_is_a_share_whatever_the_system_tells(total_s: float, idle_s: float, own_s: float) -> None:
    before = ProcessorTimes(total_s=0.0, idle_s=0.0, own_s=0.0)
    assert 0.0 <= others_share(before, ProcessorTimes(total_s=total_s, idle_s=idle_s, own_s=own_s)) <= 1.0


def test_a_process_that_is_gone_took_nothing() -> None:
    assert processor_times(os.getpid()).own_s > 0
    assert processor_times(2**22 + 1).own_s == 0


def test_a_process_takes_time_for_itself_and_within_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system reads files for a process that loads weights. Other processes do not use that time."""
    times = SimpleNamespace(user=5.0, system=3.0)
    monkeypatch.setattr(psutil, "Process", lambda _: SimpleNamespace(cpu_times=lambda: times))
    assert processor_times(7).own_s == 8.0
