"""``edgepipe setup`` on real terminals of two machines: the good way, and the bad ones."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from edgepipe.cli.service import manager_runs
from tests.support.network.lan import LanHost, LanLab
from tests.support.processes.terminal import Terminal

pytestmark = pytest.mark.lan
HOSTS = ["gamer", "studio"]

DOWN, CLEAR_LINE = "\x1b[B", "\x15"


def environment(host: LanHost, *, backend: str = "emulated") -> dict[str, str]:
    """A home of its own, an emulated device unless there shall be none, a system without systemd."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("EDGEPIPE_")}
    home = str(host.folder)
    own = {
        "HOME": home,
        "XDG_CONFIG_HOME": home,
        "XDG_DATA_HOME": home,
        "COLUMNS": "80",
        "EDGEPIPE_BACKEND": backend,
        "EDGEPIPE_LISTEN_S": "0.5",  # on this network everybody answers in milliseconds
    }
    return kept | own


def edgepipe(host: LanHost, *args: str) -> list[str]:
    """The command line on that machine."""
    return host.command([sys.executable, "-P", "-m", "edgepipe.cli", *args])


def setup(host: LanHost, *args: str) -> Terminal:
    """The wizard on that machine's terminal."""
    return Terminal(edgepipe(host, "setup", *args), environment=environment(host), lines=60)


def run(host: LanHost, *args: str, backend: str = "emulated") -> subprocess.CompletedProcess[str]:
    """A command without a terminal."""
    variables = environment(host, backend=backend)
    return subprocess.run(edgepipe(host, *args), env=variables, capture_output=True, text=True, timeout=90, check=False)


def members(host: LanHost) -> list[str]:
    """Names of the nodes that a machine sees."""
    status = json.loads(run(host, "status", "--json").stdout)
    return sorted(member["node"]["name"] for member in status["members"] if member["state"] == "alive")


def take_choice(shown: str, wanted: str, terminal: Terminal) -> None:
    """Go from the choice that is preselected down to another one, and take that."""
    choices = [line for line in shown.splitlines() if line[:3].strip() in ("", "»") and line[3:4].strip()]
    start = next(index for index, line in enumerate(choices) if "»" in line)
    steps = next(index for index, line in enumerate(choices[start:]) if wanted in line)
    terminal.send("\x1b[B" * steps + "\r")


def pairing_code(terminal: Terminal) -> str:
    """As the inviting side shows it."""
    terminal.until("pairing code:")
    found = re.search(r"pairing code:\s+(\S+)", terminal.text())
    assert found is not None
    return found.group(1)


def test_two_machines_become_a_cluster(lan: LanLab) -> None:
    gamer, studio = lan.host("gamer"), lan.host("studio")
    with setup(gamer) as first, setup(studio) as second:
        first.until("Name of this machine:")
        first.send(f"{CLEAR_LINE}gamer\r")
        first.until("Which cluster?")
        first.until("create a cluster")
        first.send("\r")
        first.until("Name of the cluster:")
        first.send("<\r")  # back to the question before
        first.until("Which cluster?", count=2)
        first.send("\r")
        first.until("Name of the cluster:", count=2)
        first.send(f"{CLEAR_LINE}kitchen\r")
        first.until("Add another machine now?")
        first.send("y\r")
        code = pairing_code(first)
        second.until("Name of this machine:")
        second.send(f"{CLEAR_LINE}studio\r")
        second.until("join 'kitchen', found on gamer (10.77.0.1)")
        second.send("\r")
        second.until("Pairing code:")
        second.send(f"{'1111-2222' if code != '1111-2222' else '3333-4444'}\r")
        second.until("Pairing code:", count=2)
        second.send(f"{code}\r")
        first.until("let it join?")
        first.send("y\r")
        first.until("'studio' joined")
        second.until("joined 'kitchen' with 1 more")
        second.until("Add another machine now?")
        first.until("Add one more?")
        for terminal in (first, second):
            terminal.send("\r")
            terminal.until("of a 32B model")
            terminal.until("Which model?")
            terminal.until("qwen3.6-27b")
            take_choice(terminal.until("go back"), "no model now", terminal)
            if manager_runs():
                terminal.until("Start edgepipe at boot?")
                terminal.send("n\r")
            else:
                terminal.until("neither systemd nor launchd")
            assert terminal.exit_code() == 0
            assert "edgepipe chat" in terminal.text()
            assert max(map(len, terminal.text().splitlines())) <= 80
    assert members(gamer) == members(studio) == ["gamer", "studio"]
    again = run(studio, "setup", "--yes")
    assert again.returncode == 0
    assert "already in 'kitchen' with 1 more" in again.stdout


def test_nobody_is_there(lan: LanLab) -> None:
    with setup(lan.host("gamer")) as terminal:
        terminal.until("Name of this machine:")
        terminal.send("\r")
        terminal.until("no node announced itself")
        terminal.until("no machine answered mDNS over IPv4")
        terminal.until("this machine is at 10.77.0.1")
        terminal.until("Which cluster?")
        terminal.send(DOWN + "\r")  # join by address
        terminal.until("Address of a machine")
        terminal.send("10.77.0.2\r")
        terminal.until("10.77.0.2 answers, but does not invite now")
        terminal.until("Which cluster?", count=2)
        terminal.send(DOWN * 4 + "\r")  # quit
        assert terminal.exit_code() == 4


@pytest.mark.long
def test_flags_answer_everything(lan: LanLab) -> None:
    gamer, studio = lan.host("gamer"), lan.host("studio")
    done = run(gamer, "setup", "--yes", "--name", "gamer", "--cluster", "attic", backend="none")
    assert (done.returncode, done.stderr) == (0, "")
    assert "created 'attic'" in done.stdout
    inviting = subprocess.Popen(
        edgepipe(gamer, "node", "invite", "--yes", "--json"),
        env=environment(gamer),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert inviting.stdout is not None
    text = ""
    while '"code"' not in text:
        text += inviting.stdout.readline()
    code = re.search(r'"code": "([^"]+)"', text)
    assert code is not None
    joined = run(studio, "setup", "--yes", "--name", "studio", "--join", code.group(1), backend="none")
    assert (joined.returncode, joined.stderr) == (0, "")
    assert "joined 'attic' with 1 more" in joined.stdout
    inviting.communicate(timeout=30)
    assert "studio" in members(studio)
    wrong = run(studio, "setup", "--yes", "--join", "1111-2222")
    assert wrong.returncode in (4, 5)


def test_without_a_terminal_it_says_how(lan: LanLab) -> None:
    done = run(lan.host("gamer"), "setup")
    assert done.returncode == 2
    assert "edgepipe setup --yes" in done.stderr


def test_it_can_be_stopped(lan: LanLab) -> None:
    with setup(lan.host("gamer")) as terminal:
        terminal.until("Name of this machine:")
        terminal.send("\x03")
        assert terminal.exit_code() == 130
        assert "continues where it stopped" in terminal.text()
