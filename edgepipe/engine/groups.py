"""Reduce the exception group of a task group to one error for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from edgepipe.errors import EdgepipeError


def first_error(group: BaseExceptionGroup[Any]) -> BaseException:
    """Return the first leaf if all leaves are EdgepipeErrors, else the whole group, so that no error hides a bug."""
    leaves = list(_leaves(group))
    return leaves[0] if all(isinstance(leaf, EdgepipeError) for leaf in leaves) else group


def _leaves(group: BaseExceptionGroup[Any]) -> Iterator[BaseException]:
    for exc in group.exceptions:
        if isinstance(exc, BaseExceptionGroup):
            yield from _leaves(cast("BaseExceptionGroup[Any]", exc))
        else:
            yield exc
