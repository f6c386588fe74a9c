"""Follows the machine's networks: hears nodes on all of them, and moves this node to one where it can be reached."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from edgepipe.cluster.address_watch import AddressWatch, MemberContact, ReachWatch
from edgepipe.cluster.interfaces import Interface, interfaces, lan_interfaces
from edgepipe.errors import ConfigInvalid

logger = logging.getLogger(__name__)

_PAUSE_S = 2.0  # pause between two checks; systems have no common notification


async def follow_networks(
    host: str,
    *,
    named: bool,
    wanted_address: Callable[[list[Interface]], str],
    contacts: Callable[[], list[MemberContact]],
    listen_on: Callable[[list[str]], Awaitable[None]],
    move: Callable[[str], None],
) -> None:
    """Check until this node moves, then call ``move`` with the address to listen on.

    named       the user chose the interface: the node stays there
    contacts    the members that answer
    listen_on   hears announcements at further addresses of this machine
    """
    watch, reach = AddressWatch(host), ReachWatch(host)
    heard_on: list[str] = []
    while True:
        try:
            available = await asyncio.to_thread(interfaces)
            wanted = wanted_address(available)
        except (ConfigInvalid, OSError):
            await asyncio.sleep(_PAUSE_S)
            continue  # the named interface is away, or the system cannot tell now
        live = [interface for interface in available if interface.carrier]
        if watch.moved(wanted=wanted, available={interface.address for interface in live}):
            logger.warning("this machine's address is now %s, no longer %s: the node moves", wanted, host)
            move(wanted)
            return
        usable = [] if named else lan_interfaces(live)
        if better := reach.better(usable=usable, contacts=contacts()):
            logger.warning("no member reaches %s, and members are in the network of %s: the node moves", host, better)
            move(better)
            return
        if (others := sorted(one.address for one in usable if one.address != host)) != heard_on:
            heard_on = others
            await listen_on(others)
        await asyncio.sleep(_PAUSE_S)
