"""Divides a bounded quantity among the users of a gateway. PURE."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from edgepipe.errors import QueueFull

_FACTOR = 3
"""A user may hold three times what stays free: 3/4 of all for one user alone, 3/7 each of two, 3/10 of three.

So users who take all that they may never take all there is (Choudhury and Hahne 1998, dynamic queue length thresholds).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """Quantity that is shared, with the words of its refusals."""

    total: int
    what: str  # "this user's requests would need too much memory"
    show: Callable[[int], str]  # an amount with its unit


class Shares:
    """Amounts that owners hold of one quantity."""

    def __init__(self, quantity: Quantity) -> None:
        self._quantity = quantity
        self._held: dict[str, int] = {}  # owners that hold some
        self._sum = 0

    @property
    def held(self) -> int:
        """Amount that all owners hold together."""
        return self._sum

    def share(self, owner: str) -> int:
        """Return the most that an owner may hold now."""
        others = self._sum - self._held.get(owner, 0)
        return max(0, (self._quantity.total - others) * _FACTOR // (_FACTOR + 1))

    def take(self, owner: str, amount: int) -> None:
        """Let an owner hold more. Raises QueueFull beyond its share."""
        held, share = self._held.get(owner, 0), self.share(owner)
        if held + amount > share:
            show, total = self._quantity.show, self._quantity.total
            raise QueueFull(
                self._quantity.what,
                fact=f"they hold {show(held)}, this one needs {show(amount)}; "
                f"this user's share is {show(share)} now, of {show(total)} for all",
                next_step="try again in a moment",
            )
        self.add(owner, amount)

    def add(self, owner: str, amount: int) -> None:
        """Count an amount that an owner holds more, or less if negative, whatever its share."""
        self._sum += amount
        held = self._held.get(owner, 0) + amount
        if held:
            self._held[owner] = held
        else:
            self._held.pop(owner, None)

    def holding(self, owner: str) -> Holding:
        """Return an empty part of the owner's amount. Leaving it, a context manager, gives all of it back."""
        return Holding(self, owner)


class Holding:
    """Part of an owner's amount that ends together: what one request holds."""

    def __init__(self, shares: Shares, owner: str) -> None:
        self.amount = 0
        self._shares = shares
        self._owner = owner

    def take(self, amount: int) -> None:
        """Hold more. Raises QueueFull."""
        self._shares.take(self._owner, amount)
        self.amount += amount

    def add(self, amount: int) -> None:
        """Hold more, or less if negative, whatever the owner's share."""
        self._shares.add(self._owner, amount)
        self.amount += amount

    def release(self) -> None:
        """Give all back."""
        self.add(-self.amount)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def memory_shares(total_bytes: int) -> Shares:
    """Return the shares of the memory of requests."""
    return Shares(
        Quantity(
            total=total_bytes,
            what="this user's requests would need too much memory",
            show=lambda amount: f"{amount / (1 << 20):.1f} MiB",
        )
    )


def request_shares(max_connections: int) -> Shares:
    """Return the shares of the connections with a request in progress."""
    return Shares(
        Quantity(
            total=max_connections,
            what="this user has too many requests in progress",
            show=lambda amount: f"{amount} connections",
        )
    )
