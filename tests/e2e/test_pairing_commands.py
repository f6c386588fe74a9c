"""Pairing as people type it: invite on one machine, join on the other, look who is there, remove."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edgepipe.errors import EdgepipeError
from tests.support.processes.bad_input import Shell, error_of, finish, until
from tests.support.processes.terminal import Terminal

NODE = ("--backend", "none", "--port", "0", "--http-port", "0", "--no-discovery")


@contextmanager
def inviting(shell: Shell, *options: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """The running command, the code, and where to join."""
    process = shell.start("node", "invite", "--yes", *options)
    try:
        assert process.stdout is not None
        text = ""
        while "waiting ..." not in text:
            line = process.stdout.readline()
            assert line, process.stderr.read() if process.stderr else ""
            text += line
        if "--long" in options:
            yield process, text.split("node join ")[1].split()[0], ""
        else:
            found = re.search(r"--host (\S+) (\S+)", text)
            assert found
            yield process, found[2], found[1]
    finally:
        process.terminate()
        process.wait(20)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def invite_at_terminal(shell: Shell) -> Terminal:
    """``node invite`` before a person."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("EDGEPIPE_", "XDG_"))}
    command = [sys.executable, "-P", "-m", "edgepipe.cli", "node", "invite"]
    return Terminal(command, environment=kept | shell.environment())


def shown_code(terminal: Terminal) -> tuple[str, str]:
    """Where to join, and the code."""
    found = re.search(r"--host (\S+) (\S+)", terminal.until("waiting ..."))
    assert found
    return found[1], found[2]


def members(shell: Shell) -> set[str]:
    """Names in the node's cluster; none while it begins anew."""
    try:
        return {member["node"]["name"] for member in shell.status()["members"]}
    except EdgepipeError:
        return set()


def test_a_node_in_the_background_joins_a_cluster_and_lives_on(tmp_path: Path) -> None:
    host, other = Shell(tmp_path / "host"), Shell(tmp_path / "other")
    with host.node(*NODE, "--name", "studio", "--cluster", "attic"):
        started = other.run("node", "start", "--background", *NODE, "--name", "laptop")
        assert started.returncode == 0, started.stderr
        try:
            with inviting(host) as (_, code, where):
                joined = other.run("node", "join", "--host", where, code, "--name", "laptop")
                assert joined.returncode == 0, joined.stderr
            until(lambda: members(other) == {"studio", "laptop"})
        finally:
            stopped = other.run("node", "stop")
        assert (stopped.returncode, stopped.stdout) == (0, "the node has stopped\n")


def test_a_node_goes_on_though_nobody_reads_its_output(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    process = shell.start("node", "start", "--json", *NODE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()  # before the node is ready
    with process.stderr:
        try:
            assert any("node ready" in line for line in process.stderr)
            assert shell.run("node", "stop").returncode == 0
            assert process.wait(20) == 0
        finally:
            process.kill()


def test_two_machines_pair_as_the_host_s_person_says_and_one_is_removed(tmp_path: Path) -> None:
    host, other = Shell(tmp_path / "host"), Shell(tmp_path / "other")
    with host.node(*NODE, "--name", "studio", "--cluster", "attic"):
        with invite_at_terminal(host) as terminal:
            where, code = shown_code(terminal)
            joining = other.start("node", "join", "--host", where, code, "--name", "studio")
            terminal.until("let it join? [Y/n]")
            terminal.send("n\r")
            error_of(finish(joining), 5, "the person at the host did not let this machine in")
            assert terminal.exit_code() == 5
        with invite_at_terminal(host) as terminal:
            where, code = shown_code(terminal)
            wrong = ("0" if code[0] != "0" else "1") + code[1:]
            error_of(other.run("node", "join", "--host", where, wrong), 5, "wrong code", "2 tries left")
            joining = other.start("node", "join", "--host", where, code, "--name", "studio")
            terminal.until("'studio' (127.0.0.1) gave the right code. Its key: ")
            terminal.until("let it join? [Y/n]")
            terminal.send("\r")
            joined = finish(joining)
            assert joined.returncode == 0, joined.stderr
            assert "joined 'attic', 1 other node" in joined.stdout
            assert "this machine is named 'studio-2'" in joined.stdout
            assert terminal.exit_code() == 0
            assert "'studio-2' joined" in terminal.text()
            assert "It can also manage the cluster" in terminal.text()
            assert "its own name 'studio' belongs to another machine" in terminal.text()
        with other.node(*NODE, "--name", "studio"):
            for shell in (host, other):
                seen = shell.until(lambda status: len(status["members"]) == 2)
                assert {member["node"]["name"] for member in seen["members"]} == {"studio", "studio-2"}
            listed = host.run("peers").stdout
            assert re.search(r"studio-2 +owner +alive", listed), listed
            removed = host.run("peers", "remove", "studio-2", "--yes")
            assert removed.returncode == 0, removed.stderr
            other.until(lambda status: status["removed"] and len(status["members"]) == 1)
        events = host.run("peers", "log").stdout
        for kind in ("founded", "pairing failed", "paired", "added", "removed"):
            assert kind in events


@pytest.mark.long
def test_a_removed_machine_comes_back_with_a_new_key_and_a_long_string(tmp_path: Path) -> None:
    host, other = Shell(tmp_path / "host"), Shell(tmp_path / "other")
    with host.node(*NODE, "--name", "gamer"):
        for key in (1, 2):
            with inviting(host, "--long", "--role", "member") as (process, string, _):
                joined = other.run("node", "join", string, "--name", "studio", *(["--new-identity"] if key > 1 else []))
                assert joined.returncode == 0, joined.stderr
                assert "'studio' joined" in finish(process).stdout
            assert host.run("peers", "remove", "studio", "--yes").returncode == 0
    assert host.run("peers", "log").stdout.count("removed") == 2


@pytest.mark.long
def test_a_running_node_joins_and_starts_anew_in_the_other_cluster(tmp_path: Path) -> None:
    host, other = Shell(tmp_path / "host"), Shell(tmp_path / "other")
    with host.node(*NODE, "--name", "gamer", "--cluster", "attic"), other.node(*NODE, "--name", "studio"):
        with inviting(host) as (_, code, where):
            joined = other.run("node", "join", "--host", where, code)
            assert joined.returncode == 0, joined.stderr
        host.until(lambda status: len(status["members"]) == 2)
        error_of(other.run("node", "join", "--host", where, code), 5, "is in cluster 'attic' already", "--new-identity")
