"""Whether other people use this computer: they reach its loopback addresses, too."""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

_PEOPLE = range(501, 1 << 31) if sys.platform == "darwin" else range(1000, 60_000)  # user ids of people's accounts
_NO_LOGIN = ("nologin", "false")

Account = tuple[int, str]  # user id, login shell


def shared_computer() -> bool:
    """Return whether several people have an account here. Takes milliseconds with any source of accounts."""
    if sys.platform == "darwin":
        return several_people((account.pw_uid, account.pw_shell) for account in pwd.getpwall())
    return shared_by_file(Path("/etc/passwd"), own_uid=os.getuid(), has_name=_has_name)


def shared_by_file(passwd: Path, *, own_uid: int, has_name: Callable[[int], bool]) -> bool:
    """Return whether the file lists several people, or lacks this process's own account though that has a name.

    Listing a directory (LDAP, Active Directory) may take minutes. An account that has a name but no line in the file
    comes from a directory, and a directory means several people. A container's bare user id has no name.
    """
    accounts = list(_accounts_in(passwd))
    return several_people(accounts) or (own_uid not in {uid for uid, _ in accounts} and has_name(own_uid))


def several_people(accounts: Iterable[Account]) -> bool:
    """Return whether at least two accounts are of people who can log in."""
    return len({uid for uid, shell in accounts if uid in _PEOPLE and not shell.endswith(_NO_LOGIN)}) > 1


def _accounts_in(passwd: Path) -> Iterable[Account]:
    try:
        lines = passwd.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        parts = line.split(":")  # name, password, user id, group id, comment, home, shell
        with suppress(ValueError, IndexError):
            yield int(parts[2]), parts[6]


def _has_name(uid: int) -> bool:
    with suppress(KeyError):
        pwd.getpwuid(uid)
        return True
    return False
