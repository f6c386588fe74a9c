"""Whether other people use this computer: they reach its loopback addresses, too."""

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
    """Return whether several people have an account here. Takes milliseconds with any source of accounts.

    Linux: reads ``/etc/passwd``, since listing a directory (LDAP, Active Directory) may take minutes. If this process's
    own account is missing in that file, it comes from a directory, and a directory means several people.
    """
    if sys.platform == "darwin":
        return several_people((account.pw_uid, account.pw_shell) for account in pwd.getpwall())
    accounts = list(_local_accounts())
    return several_people(accounts) or _from_directory(accounts, own_uid=os.getuid())


def several_people(accounts: Iterable[Account]) -> bool:
    """Return whether at least two accounts are of people who can log in."""
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
    """Return whether the own account has a name but no line in the file; a container's bare user id has no name."""
    if any(uid == own_uid for uid, _ in accounts):
        return False
    with suppress(KeyError):
        pwd.getpwuid(own_uid)
        return True
    return False
