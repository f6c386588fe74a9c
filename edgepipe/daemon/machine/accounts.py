"""Whether other people use this computer: its loopback addresses are theirs, too."""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_PASSWD = Path("/etc/passwd")
_PEOPLE = range(501, 1 << 31) if sys.platform == "darwin" else range(1000, 60_000)  # user ids of people's accounts
_NO_LOGIN = ("nologin", "false")

Account = tuple[int, str]  # user id, login shell


def shared_computer() -> bool:
    """Whether several people have an account here. Takes milliseconds, whatever the accounts come from.

    Linux: those of ``/etc/passwd``. Listing all that a directory (LDAP, Active Directory) knows may take minutes; a
    directory is recognised by this process's own account, which it has and the file has not.
    """
    if sys.platform == "darwin":
        return several_people((one.pw_uid, one.pw_shell) for one in pwd.getpwall())
    accounts = list(_local_accounts())
    return several_people(accounts) or _from_directory(accounts, own_uid=os.getuid())


def several_people(accounts: Iterable[Account]) -> bool:
    """Whether at least two accounts are of people who can log in."""
    return len({uid for uid, shell in accounts if uid in _PEOPLE and not shell.endswith(_NO_LOGIN)}) > 1


def _local_accounts() -> Iterable[Account]:
    try:
        lines = _PASSWD.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        parts = line.split(":")  # name, password, user id, group id, comment, home, shell
        with suppress(ValueError, IndexError):
            yield int(parts[2]), parts[6]


def _from_directory(accounts: Iterable[Account], *, own_uid: int) -> bool:
    """Whether the account has a name though the file does not list it; a container's bare number has none."""
    if any(uid == own_uid for uid, _ in accounts):
        return False
    with suppress(KeyError):
        pwd.getpwuid(own_uid)
        return True
    return False
