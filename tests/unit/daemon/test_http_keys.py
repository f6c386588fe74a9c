"""Which clients of HTTP need a key, and that this user's own commands have it."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

import edgepipe.cli.find
from edgepipe.cli.find import find_target
from edgepipe.cluster.discovery import Announcement
from edgepipe.config import Config, load_config
from edgepipe.daemon.machine.accounts import several_people, shared_by_file
from edgepipe.daemon.machine.http_keys import key_file, keys_in_force, read_key
from edgepipe.errors import ConfigInvalid, NodeUnreachable
from tests.support.daemon.admin_server import FakeNode, answering
from tests.support.processes.command_line import make_status

SHELL, NONE = "/bin/bash", "/usr/sbin/nologin"
GIVEN = "a-key-of-my-own"


def config(**settings: Any) -> Config:
    """Settings as flags give them, nothing else."""
    return load_config(settings, environ={}, file=None).values


@pytest.mark.parametrize(
    ("found", "several"),
    [
        ([], False),
        ([(0, SHELL), (1000, SHELL)], False),
        ([(0, SHELL), (1000, SHELL), (1001, SHELL)], True),
        ([(1000, SHELL), (1000, SHELL)], False),  # two names of one account
        ([(1000, SHELL), (1001, NONE), (1002, "/bin/false"), (65534, NONE)], False),
        ([(1000, SHELL), (1001, "")], True),  # an empty field is the system's own shell
        ([(33, SHELL), (1000, SHELL), (999, "/bin/sh")], False),
    ],
)
def test_people_are_accounts_that_can_log_in(found: list[tuple[int, str]], several: bool) -> None:
    assert several_people(found) == several


def test_accounts_are_read_from_the_file_and_a_directory_is_recognised(tmp_path: Path) -> None:
    file = tmp_path / "passwd"
    root = f"root:x:0:0:root:/root:{SHELL}\n+::::::\nno line\n"

    def shared(uid: int) -> bool:
        return shared_by_file(file, own_uid=uid, has_name={1000, 70_001}.__contains__)

    file.write_text(f"{root}ann:x:1000:1000:Ann:/home/ann:{SHELL}\n")
    assert not shared(1000)
    assert shared(70_001), "known by name, and not from the file"
    assert not shared(70_002), "a container's bare number"
    file.write_text(f"{root}ann:x:1000:1000::/home/ann:{SHELL}\nbob:x:1001:1001::/home/bob:{SHELL}\n")
    assert shared(70_002)
    file.unlink()
    assert not shared(70_002)


@pytest.mark.parametrize(
    ("settings", "shared", "num_keys", "on_loopback"),
    [
        ({}, False, 0, False),
        ({}, True, 1, True),
        ({"local_key": "no"}, True, 0, False),
        ({"local_key": "yes"}, False, 1, True),
        ({"http_host": "0.0.0.0"}, False, 1, False),
        ({"http_host": "0.0.0.0"}, True, 1, True),
        ({"http_host": "0.0.0.0", "local_key": "no"}, True, 1, False),
        ({"api_key": GIVEN}, False, 1, True),
        ({"api_key": GIVEN, "local_key": "no"}, True, 1, False),
    ],
)
def test_who_needs_a_key(
    tmp_path: Path,
    settings: dict[str, str],
    shared: bool,
    num_keys: int,
    on_loopback: bool,
) -> None:
    found = keys_in_force(config(**settings), tmp_path, shared=lambda: shared)
    assert (len(found.keys), found.on_loopback) == (num_keys, on_loopback)
    if not num_keys:
        assert not key_file(tmp_path).exists()
        return
    assert found.keys == (read_key(tmp_path),)
    assert stat.S_IMODE(key_file(tmp_path).stat().st_mode) == 0o600
    assert keys_in_force(config(**settings), tmp_path, shared=lambda: shared) == found  # the same after the next start


def test_the_setting_is_checked() -> None:
    with pytest.raises(ConfigInvalid):
        config(local_key="sometimes")


async def test_commands_bring_the_key_to_their_own_node_and_to_no_other_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    keys_in_force(config(local_key="yes"), tmp_path)

    with answering(tmp_path, FakeNode(status=make_status())):
        assert (await find_target(tmp_path, "")).api_key == read_key(tmp_path) != ""

    asked: list[str] = []

    async def heard(**_: Any) -> list[Announcement]:
        return [Announcement(cluster_id="c", cluster_name="c", node_id="n", node_name="n", host="192.0.2.9", port=7117)]

    class Client:
        def __init__(self, base_url: str, *, api_key: str) -> None:
            asked.append(api_key)
            raise NodeUnreachable

    monkeypatch.setattr("edgepipe.cluster.browsing.browse", heard)  # mDNS would find other machines
    monkeypatch.setattr(edgepipe.cli.find, "ChatClient", Client)  # no request may leave this machine
    with pytest.raises(NodeUnreachable):
        await find_target(tmp_path, "tiny")
    assert asked == [""]
