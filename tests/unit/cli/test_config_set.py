"""``edgepipe config set``: several at once, links, and files that cannot be written."""

from __future__ import annotations

import fcntl
import os
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edgepipe.cli import settings_file
from edgepipe.cli.settings_file import write_settings
from edgepipe.errors import ConfigInvalid
from tests.support.processes.command_line import Run


def test_settings_that_are_written_at_once_are_all_kept(tmp_path: Path) -> None:
    for number in range(10):
        path = tmp_path / str(number) / "config.toml"
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda key, path=path: write_settings(path, {f"key{key}": key}), range(6)))
        assert tomllib.loads(path.read_text()) == {f"key{key}": key for key in range(6)}
        assert [file.name for file in path.parent.iterdir()] == ["config.toml"]


def test_a_linked_settings_file_stays_a_link(run: Run, tmp_path: Path) -> None:
    real, link = tmp_path / "dotfiles" / "edgepipe.toml", tmp_path / "config" / "edgepipe" / "config.toml"
    for path in (real, link):
        path.parent.mkdir(parents=True)
    real.write_text("# mine\n")
    link.symlink_to(real)
    assert run("config", "set", "name", "studio").code == 0
    assert link.is_symlink()
    assert real.read_text() == '# mine\nname = "studio"\n'
    assert [file.name for file in link.parent.iterdir()] == ["config.toml"]


def test_a_link_to_a_file_that_is_not_there_yet_makes_it(tmp_path: Path) -> None:
    link = tmp_path / "config.toml"
    link.symlink_to(tmp_path / "dotfiles" / "edgepipe.toml")
    write_settings(link, {"name": "studio"})
    assert link.is_symlink()
    assert link.read_text() == 'name = "studio"\n'


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").symlink_to(tmp_path / "b.toml")
    (tmp_path / "b.toml").symlink_to(tmp_path / "a.toml")
    with pytest.raises(ConfigInvalid, match="cannot be changed"):
        write_settings(tmp_path / "a.toml", {"name": "studio"})


def test_a_command_that_never_ends_does_not_block_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_file, "_LOCK_S", 0.0)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(ConfigInvalid) as caught:
            write_settings(tmp_path / "config.toml", {"name": "studio"})
        assert "another edgepipe command" in caught.value.fact
    finally:
        os.close(descriptor)
