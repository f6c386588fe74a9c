"""The command line as people type it, in processes of its own, and the form that every error must have."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from edgepipe.cli.admin import connect
from edgepipe.cli.output import as_dict
from edgepipe.spec.facts import ModelConfig
from edgepipe.store.store import ModelStore
from edgepipe.weights.emulated_folder import write_model_folder

WAIT_S = 60.0  # a busy machine starts Python slowly
LOOK_S = 0.05

Done = subprocess.CompletedProcess[str]


@dataclass(frozen=True, slots=True)
class Shell:
    """Runs edgepipe away from the settings of whoever runs the tests."""

    home: Path
    variables: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def data_dir(self) -> Path:
        """Where a node keeps its things."""
        return Path(self.variables.get("EDGEPIPE_DATA_DIR") or self.home / "data" / "edgepipe")

    def with_variables(self, **variables: str) -> Shell:
        """The same with more environment variables."""
        return Shell(self.home, {**self.variables, **variables})

    def environment(self) -> dict[str, str]:
        """Variables that keep everything in this home."""
        places = {"HOME": self.home, "XDG_CONFIG_HOME": self.home / "config", "XDG_DATA_HOME": self.home / "data"}
        own = {key: str(path) for key, path in places.items()}
        common = {
            "COLUMNS": "80",
            "OMP_NUM_THREADS": "1",
            "EDGEPIPE_INTERFACE": "127.0.0.1",
            "EDGEPIPE_LOCAL_KEY": "no",
        }
        return own | common | dict(self.variables)

    def start(self, *args: str) -> subprocess.Popen[str]:
        """Start a command; its output is kept."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("EDGEPIPE_", "XDG_"))}
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "edgepipe.cli", *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=kept | self.environment(),
        )

    def run(self, *args: str) -> Done:
        """Run a command to its end."""
        return finish(self.start(*args))

    def status(self) -> dict[str, Any]:
        """What ``status --json`` says; asked in this process, which is quick, unless edgepipe is another one here."""
        if "PYTHONPATH" in self.variables:
            return json.loads(self.run("status", "--json").stdout)

        async def ask() -> dict[str, Any]:
            async with connect(self.data_dir) as admin:
                return as_dict(await admin.status())

        return asyncio.run(ask())

    def until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first status for which ``wanted`` holds."""
        deadline_s, status = time.monotonic() + WAIT_S, dict[str, Any]()
        while time.monotonic() < deadline_s:
            if wanted(status := self.status()):
                return status
            time.sleep(LOOK_S)
        raise AssertionError(f"not in {WAIT_S:.0f} s; the last status was\n{json.dumps(status, indent=1)}")

    @contextmanager
    def node(self, *args: str, expect: int = 0) -> Iterator[Node]:
        """A node in this home that computes nothing unless told to, stopped at the end as by ^C."""
        defaults = ["--port", "0", "--http-port", "0", "--backend", "none", "--no-discovery", "--name", "a"]
        process = self.start("node", "start", "--json", *defaults, *args)
        try:
            yield Node(process, _ready(process))
        finally:
            family = _family(process.pid)
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=WAIT_S)
            for orphan in family:
                with suppress(psutil.NoSuchProcess):
                    orphan.kill()
        assert process.returncode == expect, stderr
        assert "Traceback" not in stderr


@dataclass(frozen=True, slots=True)
class Node:
    """A running node."""

    process: subprocess.Popen[str]
    ready: Mapping[str, Any]  # its report that it is ready

    @property
    def address(self) -> str:
        """HOST:PORT of the daemon."""
        return self.ready["address"]

    @property
    def url(self) -> str:
        """Its gateway."""
        return f"http://127.0.0.1:{self.ready['http_port']}"

    def child(self, kind: str) -> psutil.Process:
        """The newest child process of a kind: gateway, stage or engine."""
        return max(self._children(kind), key=lambda child: child.create_time())

    def has_child(self, kind: str) -> bool:
        """Whether a child process of the kind runs."""
        return bool(self._children(kind))

    def _children(self, kind: str) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        for child in psutil.Process(self.process.pid).children():
            with suppress(psutil.NoSuchProcess):
                found += [child] * (child.cmdline()[-1:] == [kind])
        return found


def until(wanted: Callable[[], bool]) -> None:
    """Look often until something is so."""
    deadline_s = time.monotonic() + WAIT_S
    while not wanted():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def finish(process: subprocess.Popen[str]) -> Done:
    """Wait for the end of a process that was started."""
    try:
        stdout, stderr = process.communicate(timeout=WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        stdout, stderr = process.communicate()
        raise AssertionError(f"{process.args} did not end:\n{stdout}{stderr}") from None
    return Done(process.args, process.returncode, stdout, stderr)


def error_of(done: Done, code: int, *words: str, lines: Sequence[int] = (3,)) -> str:
    """The error, after checking its form: exit code, three short lines, no traceback, the words that it must have."""
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    message = done.stderr[done.stderr.find("error: ") :].rstrip("\n").split("\n")  # a node logs before it
    assert len(message) in lines, done.stderr
    assert message[0].startswith("error: ")
    assert len(message) < 3 or message[2].startswith("   try: ")
    assert max(len(line) for line in message) < 400, done.stderr  # the longest lists all settings
    for word in words:
        assert word in done.stderr, done.stderr
    return done.stderr


def emulated_model(shell: Shell, config: ModelConfig, name: str = "tiny") -> None:
    """Put an emulated model into a home's store."""
    write_model_folder(shell.home / name, config)
    ModelStore(shell.data_dir / "models").pull(str(shell.home / name))


def _ready(process: subprocess.Popen[str]) -> Mapping[str, Any]:
    assert process.stdout is not None
    text = ""
    while line := process.stdout.readline():
        text += line
        if line.rstrip() == "}":
            ready = json.loads(text)
            assert "address" in ready, text
            return ready
    _, stderr = process.communicate()
    raise AssertionError(stderr)


def _family(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
