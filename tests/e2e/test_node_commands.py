"""``edgepipe node start`` as people use it: in the background, and on a terminal."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

from tests.support.processes.bad_input import Shell
from tests.support.processes.terminal import Terminal

NODE = ("--port", "0", "--http-port", "0", "--backend", "none", "--no-discovery", "--name", "studio")


def test_a_node_in_the_background_runs_until_node_stop(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    started = shell.run("node", "start", "--background", *NODE, "--http-name", "a.example", "--http-name", "b.example")
    try:
        assert started.returncode == 0, started.stderr
        assert "node 'studio' of cluster 'home' is ready at 127.0.0.1:" in started.stdout
        assert "  stop    edgepipe node stop\n" in started.stdout
        assert shell.status()["members"][0]["node"]["name"] == "studio"
        again = shell.run("node", "start", "--background", *NODE)
        assert again.returncode == 2
        assert "another edgepipe node uses the data directory" in again.stderr
        assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", shell.run("logs").stdout)
    finally:
        stopped = shell.run("node", "stop")
    assert (stopped.returncode, stopped.stdout) == (0, "the node has stopped\n")
    assert (
        json.loads(shell.run("config", "show", "--json").stdout)["name"]["value"] == "studio"
    )  # also at its next start
    assert "node stops" in (shell.data_dir / "node.log").read_text()
    assert "node stops" not in (shell.data_dir / "start.log").read_text()  # nothing bounds that file


def test_a_person_reads_first_that_the_node_is_ready(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    command = [sys.executable, "-P", "-m", "edgepipe.cli", "node", "start", *NODE]
    with Terminal(command, environment=os.environ | shell.environment(), columns=120) as terminal:
        shown = terminal.until("node ready name=studio")
        terminal.send("\x03")
        assert terminal.exit_code() == 0
    assert shown.startswith("node 'studio' of cluster 'home' is ready at")
    assert shown.index("  stop    ^C") < shown.index("child started")
