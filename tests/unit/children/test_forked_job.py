"""Jobs in a forked process: an answer with its cost, and an end at each limit. Each case forks a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

SCRIPT = """
import json, sys
from edgepipe.children.forked_job import run_forked
def busy():
    while True: pass
def large(): return str(len(bytearray(64 << 20))).encode()
def larger(): return str(len(bytearray(1 << 30))).encode()
def crash(): raise ValueError
result = run_forked({job}, cpu_s=0.2, memory_bytes=256 << 20)
answer = None if result.answer is None else result.answer.decode()
print(json.dumps([answer, result.cost.cpu_s, result.cost.peak_bytes]))
"""


def run(job: str) -> list[Any]:
    command = [sys.executable, "-c", SCRIPT.replace("{job}", job)]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60, text=True)
    return json.loads(done.stdout)


def test_a_job_answers_with_what_it_took() -> None:
    answer, cpu_s, peak_bytes = run("large")
    assert answer == str(64 << 20)
    assert cpu_s > 0
    assert 64 << 20 <= peak_bytes < 80 << 20


def test_an_endless_job_ends_at_its_processor_time() -> None:
    answer, cpu_s, _ = run("busy")
    assert answer is None
    assert cpu_s >= 0.2


@pytest.mark.skipif(sys.platform != "linux", reason="the platform refuses the limit")
def test_a_job_that_wants_more_memory_ends_there() -> None:
    answer, _, peak_bytes = run("larger")
    assert answer is None
    assert peak_bytes < 256 << 20


def test_a_job_that_crashes_has_no_answer() -> None:
    assert run("crash")[0] is None
