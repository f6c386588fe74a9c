"""A folder whose files are trusted: whose rights over it, its files and the folders above it are refused."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NamedTuple

import pytest

from edgepipe.own_files import NotOwn, open_own_folder, refusal

OWN, OTHER = 1234567, 7654321  # no accounts, so neither has a group of its own


class Rights(NamedTuple):
    """Rights of a file."""

    st_mode: int
    st_uid: int
    st_gid: int = 7654321


@pytest.mark.parametrize(
    ("rights", "reason"),
    [
        (Rights(stat.S_IFDIR | 0o700, OWN), ""),
        (Rights(stat.S_IFREG | 0o644, OWN), ""),
        (Rights(stat.S_IFREG | 0o755, 0), ""),
        (Rights(stat.S_IFREG | 0o600, OTHER), f"its owner is user {OTHER}, this is user {OWN}"),
        (Rights(stat.S_IFDIR | 0o770, OWN), "others may write it, its mode is 0770"),
        (Rights(stat.S_IFDIR | 0o702, OWN), "others may write it, its mode is 0702"),
        (Rights(stat.S_IFDIR | 0o1777, 0), "others may write it, its mode is 1777"),
    ],
)
def test_what_another_user_may_change_is_refused(rights: Rights, reason: str) -> None:
    assert refusal(rights, uid=OWN) == reason


def test_a_group_of_one_user_may_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Ubuntu, where each user has such a group and new folders are group-writable."""
    users = {OWN: ("me", 11), OTHER: ("you", 12), OTHER + 1: ("they", 12)}

    class User(NamedTuple):
        pw_name: str
        pw_uid: int
        pw_gid: int

    class Group(NamedTuple):
        gr_mem: list[str]

    found = [User(name, uid, gid) for uid, (name, gid) in users.items()]
    groups = {11: Group([]), 12: Group([]), 13: Group(["me"]), 14: Group(["me", "you"])}
    monkeypatch.setattr("pwd.getpwall", lambda: found)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: next(user for user in found if user.pw_uid == uid))
    monkeypatch.setattr("grp.getgrgid", groups.__getitem__)
    allowed = [gid for gid in range(10, 15) if not refusal(Rights(stat.S_IFDIR | 0o775, OWN, gid), uid=OWN)]
    assert allowed == [11, 13]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("place", ["above", "folder", "file"])
def test_nothing_of_another_user_is_used(place: str, tmp_path: Path) -> None:
    folder = tmp_path / "above" / "folder"
    with open_own_folder(folder) as opened:
        opened.write("file", b"x")
    os.chown(next(path for path in (folder / "file", folder, folder.parent) if path.name == place), OTHER, -1)
    with pytest.raises(NotOwn, match=str(OTHER)), open_own_folder(folder) as opened:
        opened.read("file")


def test_a_folder_in_a_sticky_one_is_used(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with open_own_folder(tmp_path / "folder") as opened:
        opened.write("file", b"x")
        assert opened.read("file") == b"x"


def test_a_link_above_is_followed_to_a_folder_that_others_may_not_change(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(0o700)
    (tmp_path / "link").symlink_to("real")
    with open_own_folder(tmp_path / "link" / "folder") as opened:
        opened.write("file", b"x")
    (tmp_path / "real").chmod(0o777)
    with pytest.raises(NotOwn, match="real"), open_own_folder(tmp_path / "link" / "folder"):
        pass


def test_folders_above_the_home_are_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shared" / "home").mkdir(parents=True)
    (tmp_path / "shared").chmod(0o777)
    monkeypatch.setenv("HOME", str(tmp_path / "shared" / "home"))
    with open_own_folder(tmp_path / "shared" / "home" / "folder") as opened:
        opened.write("file", b"x")


def test_a_pipe_in_the_folder_holds_nobody_up(tmp_path: Path) -> None:
    with open_own_folder(tmp_path / "folder") as opened:
        os.mkfifo(tmp_path / "folder" / "pipe")
        with pytest.raises(NotOwn, match="no plain file"):
            opened.read("pipe")
