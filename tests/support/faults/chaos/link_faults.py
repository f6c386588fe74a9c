"""Faults of cables and links; all of them need the LAN lab."""

from __future__ import annotations

import asyncio

from tests.support.faults.chaos.nemesis import Fault, Nemesis


async def _cut_node(nemesis: Nemesis) -> None:
    """A cable is pulled, and put back when the streams have ended."""
    lab, name = nemesis.lab, nemesis.other_node()
    await nemesis.strike(f"cable of {name} out")
    lab.cut(name)

    async def cure() -> None:
        nemesis.note(f"cable of {name} in")
        lab.heal(name)

    nemesis.heal_by(cure)


async def _cut_one_way(nemesis: Nemesis) -> None:
    """Nothing that one node says arrives; it hears all."""
    lab, name = nemesis.lab, nemesis.other_node()
    await nemesis.strike(f"{name} is not heard any more")
    others = [other for other in nemesis.cluster.names if other != name]
    for other in others:
        lab.link(name, other).change(cut=True)

    async def cure() -> None:
        for other in others:
            lab.link(name, other).change(cut=False)

    nemesis.heal_by(cure)


async def _cut_pair(nemesis: Nemesis) -> None:
    """Two nodes that are not the client's lose each other; both reach the client's."""
    lab = nemesis.lab
    left, right = nemesis.random.sample(nemesis.cluster.names[1:], 2)
    await nemesis.strike(f"{left} and {right} do not reach each other")
    lab.cut(left, right)

    async def cure() -> None:
        lab.heal(left, right)

    nemesis.heal_by(cure)


async def _flap_node(nemesis: Nemesis) -> None:
    """A cable with a loose contact: a second on, a second off."""
    lab, name = nemesis.lab, nemesis.other_node()
    await nemesis.strike(f"cable of {name} loose")
    for _ in range(4):
        lab.cut(name)
        await asyncio.sleep(1.0)
        lab.heal(name)
        await asyncio.sleep(1.0)
    nemesis.note(f"cable of {name} in")


async def _change_address(nemesis: Nemesis) -> None:
    """From one network to another that has the same machines: the old address is gone, and so is every connection."""
    name = nemesis.other_node()
    host = nemesis.lab.host(name)
    address = f"10.77.{nemesis.random.randint(1, 250)}.{nemesis.random.randint(1, 250)}/16"
    await nemesis.strike(f"{name} gets the address {address}")
    for command in ("addr flush dev lan0", f"addr add {address} dev lan0", "route add default dev lan0"):
        done = await host.run(["ip", *command.split()])
        assert done.exit_code == 0, done.stderr


async def _blink_links(nemesis: Nemesis) -> None:
    """Every link silent for half a second."""
    lab = nemesis.lab
    await nemesis.strike("all cables out for 0.5 s")
    lab.shape(cut=True)
    await asyncio.sleep(0.5)
    lab.shape(cut=False)


async def _lossy_links(nemesis: Nemesis) -> None:
    """Five in a hundred frames vanish until the streams have ended."""
    lab = nemesis.lab
    await nemesis.strike("5 % loss everywhere")
    lab.shape(loss=0.05)

    async def cure() -> None:
        lab.shape(loss=0.0)

    nemesis.heal_by(cure)


async def _slow_links(nemesis: Nemesis) -> None:
    """50 ms more each way and 8 Mbit/s until the streams have ended."""
    lab = nemesis.lab
    await nemesis.strike("50 ms and 8 Mbit/s everywhere")
    lab.shape(delay_s=0.05, bytes_per_s=1e6)

    async def cure() -> None:
        lab.shape(delay_s=0.0005, bytes_per_s=125e6)

    nemesis.heal_by(cure)


LINK_FAULTS: dict[str, Fault] = {
    "cut node": _cut_node,
    "cut one way": _cut_one_way,
    "cut pair": _cut_pair,
    "flap node": _flap_node,
    "change address": _change_address,
    "blink links": _blink_links,
    "lossy links": _lossy_links,
    "slow links": _slow_links,
}
