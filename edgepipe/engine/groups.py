"""Exception groups of task groups, as the one error that people want to read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from edgepipe.errors import EdgepipeError


def first_error(group: BaseExceptionGroup[Any]) -> BaseException:
    """The first leaf if all leaves are ours; else the group itself, since a bug must not be hidden by an error."""
    leaves = list(_leaves(group))
    return leaves[0] if all(isinstance(leaf, EdgepipeError) for leaf in leaves) else group


def _leaves(group: BaseExceptionGroup[Any]) -> Iterator[BaseException]:
    for exc in group.exceptions:
        if isinstance(exc, BaseExceptionGroup):
            yield from _leaves(cast("BaseExceptionGroup[Any]", exc))
        else:
            yield exc
