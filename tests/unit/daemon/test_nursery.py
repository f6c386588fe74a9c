"""Children that the nursery forks are like those that the system starts.

A program of its own forks the nursery: a test's process has threads.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt orphans")

_BEFORE = """
import asyncio, json, os, signal, sys, tempfile
from edgepipe.config import prepare_environment
prepare_environment()
import psutil
from edgepipe.daemon.processes.nursery import start_nursery
from edgepipe.workers.nursery import ForkRequest

nursery = start_nursery()
assert nursery is not None

async def fork(kind="stage", threads=0, mark=-1):
    request = ForkRequest(kind=kind, threads=threads, mark=mark)
    return await nursery.fork(request, mark=mark, within_s=60.0, limit=1 << 16)

def nursery_process():
    return next(child for child in psutil.Process().children() if child.cmdline()[-1] == "nursery")

"""


def _run(body: str, *, status: int = 0) -> Any:
    """Run the body of ``async def main`` in a program with a nursery; what it prints."""
    code = f"{_BEFORE}async def main():\n{textwrap.indent(textwrap.dedent(body), '    ')}\nasyncio.run(main())\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr
    return json.loads(done.stdout)


def test_a_forked_child_is_like_one_that_the_system_starts() -> None:
    seen = _run(
        """
        with tempfile.TemporaryFile() as mark:
            child = await fork("gateway", threads=3, mark=mark.fileno())
            process = psutil.Process(child.pid)
            descriptors = {int(number) for number in os.listdir(f"/proc/{child.pid}/fd")}
            seen = {
                "own child": process.ppid() == os.getpid(),
                "own session": os.getsid(child.pid) == os.getpgid(child.pid) == child.pid,
                "descriptors": descriptors == {0, 1, 2, mark.fileno()},
                "mark": os.path.samestat(os.stat(f"/proc/{child.pid}/fd/{mark.fileno()}"), os.fstat(mark.fileno())),
                "runs": child.returncode is None,
            }
        while process.cmdline()[-1] == "nursery":
            await asyncio.sleep(0.01)
        seen["words"] = process.cmdline()[-2:]
        child.stdin.write(b"no settings\\n")
        seen["said"] = (await child.stdout.read()).decode()
        seen["status"] = await child.wait()
        print(json.dumps(seen))
        """
    )
    said = seen.pop("said")
    assert "a child process needs its settings as one line of JSON" in said
    assert "Traceback" not in said
    assert seen.pop("words") == ["edgepipe.workers.main", "gateway"]
    assert seen.pop("status") == 1
    assert all(seen.values()), seen


def test_a_child_s_group_can_be_killed_as_soon_as_it_is_known() -> None:
    status = _run(
        """
        child = await fork()
        os.killpg(child.pid, signal.SIGKILL)
        print(await child.wait())
        """
    )
    assert status == -signal.SIGKILL


def test_a_daemon_survives_its_nursery_and_so_do_its_children() -> None:
    first_status, second, pid_is_free = _run(
        """
        child = await fork()
        nursery_process().kill()
        second = await fork()
        assert child.returncode is None
        child.stdin.write_eof()
        print(json.dumps([await child.wait(), second, psutil.Process().children() == []]))
        """
    )
    assert first_status == 1  # it found no settings
    assert second is None
    assert pid_is_free


def test_children_and_nursery_end_with_their_daemon() -> None:
    pids = _run(
        """
        await fork()
        print(json.dumps([child.pid for child in psutil.Process().children()]), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        status=-signal.SIGKILL,
    )
    assert len(pids) == 2
    family = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []
