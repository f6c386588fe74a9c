"""Faults and changes of whole machines: power cuts, freezes, sleep, drains, shutdowns, a daemon that dies alone."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from functools import partial

import psutil

from tests.support.faults.chaos.cluster import WHOLE_S
from tests.support.faults.chaos.nemesis import Fault, Nemesis
from tests.support.processes.nodes import children_of

_NAP_S = 60.0


async def _stop_node(nemesis: Nemesis) -> None:
    """A machine that freezes as a whole and thaws: its late frames must be dropped."""
    name = nemesis.other_node()
    await nemesis.freeze(f"all of {name}", _processes(nemesis, name), thaw_s=6.0)


async def _blink_node(nemesis: Nemesis) -> None:
    """Frozen shorter than anybody would call dead."""
    name = nemesis.other_node()
    await nemesis.freeze(f"all of {name} for 1 s", _processes(nemesis, name), thaw_s=1.0)


def _processes(nemesis: Nemesis, name: str) -> list[psutil.Process]:
    daemon = psutil.Process(nemesis.cluster.running[name].process.pid)
    return [daemon, *children_of(daemon.pid)]


async def _kill_node(nemesis: Nemesis) -> None:
    name = nemesis.other_node()
    await nemesis.strike(f"power cut at {name}")
    await nemesis.cluster.kill_node(name)
    nemesis.heal_by(partial(nemesis.cluster.start, name))


async def _kill_daemon(nemesis: Nemesis) -> None:
    """The daemon alone: its children must not live on without it."""
    name = nemesis.other_node()
    node = nemesis.cluster.running.pop(name)
    family = children_of(node.process.pid)
    await nemesis.strike(f"SIGKILL daemon of {name} alone")
    node.kill()
    await node.process.wait()

    async def cure() -> None:
        _, alive = await asyncio.to_thread(psutil.wait_procs, family, 10.0)
        assert not alive, f"children outlived their daemon: {alive}"
        await nemesis.cluster.start(name)

    nemesis.heal_by(cure)


async def _term_engines_node(nemesis: Nemesis) -> None:
    """The engine's machine is shut down in order."""
    name = await nemesis.victim_node("engine")
    node = nemesis.cluster.running.pop(name)
    await nemesis.strike(f"SIGTERM {name}")
    node.process.terminate()

    async def cure() -> None:
        async with asyncio.timeout(WHOLE_S):
            await node.process.wait()
        await nemesis.cluster.start(name)

    nemesis.heal_by(cure)


async def _announce_sleep(nemesis: Nemesis) -> None:
    """The system tells that the machine is about to sleep; it then sleeps without another word."""
    name = await nemesis.victim_node("stage")
    node = nemesis.cluster.running[name]
    await nemesis.strike(f"{name} is about to sleep")
    node.process.send_signal(signal.SIGUSR1)
    asleep = await nemesis.cluster.first.until(
        lambda status: any(absent.state == "asleep" for absent in status.absent), timeout_s=15.0
    )
    nemesis.note(f"asleep: {[absent.name for absent in asleep.absent]}")
    await nemesis.cluster.kill_node(name)
    nemesis.heal_by(partial(nemesis.cluster.start, name))


async def _drain_stages_node(nemesis: Nemesis) -> None:
    """A machine is to be switched off: its stages are prepared elsewhere first."""
    name, _ = await nemesis.victim("stage")
    await nemesis.strike(f"{name} is drained")
    await _drain(nemesis, name)


async def _drain_engines_node(nemesis: Nemesis) -> None:
    """As before, and the engine is there, too."""
    name, _ = await nemesis.victim("engine", spare_first=False)
    await nemesis.strike(f"{name} is drained, with the engine")
    await _drain(nemesis, name)


async def _kill_stage_in_drain(nemesis: Nemesis) -> None:
    """A stage dies while stages move: the old epoch or the new one goes on, never both."""
    name, _ = await nemesis.victim("stage")
    pids = [pid for _, pid in await nemesis.victims("stage")]
    await nemesis.strike(f"{name} is drained")
    draining = asyncio.ensure_future(_drain(nemesis, name))
    await asyncio.sleep(nemesis.random.uniform(0.0, 0.5))
    pid = nemesis.random.choice(pids)
    nemesis.note(f"SIGKILL stage {pid} meanwhile")
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).kill()
    await draining


async def _drain(nemesis: Nemesis, name: str) -> None:
    """Returns when nothing runs there any more; it takes work again when the trial is over."""
    node = nemesis.cluster.running[name]

    async def cure() -> None:
        nemesis.note(f"{name} takes work again")
        await node.drain(undo=True, timeout_s=5)

    nemesis.heal_by(cure)
    await node.drain(timeout_s=WHOLE_S)
    nemesis.note(f"nothing runs on {name}")


async def _break_device(nemesis: Nemesis) -> None:
    """A device fails every step while its process lives, until the streams have ended elsewhere."""
    name = await nemesis.victim_node("stage")
    await nemesis.strike(f"the device of {name} breaks")
    nemesis.cluster.break_device(name)
    nemesis.heal_by(partial(_mend, nemesis, name))


async def _fail_step(nemesis: Nemesis) -> None:
    """One step fails, and never again."""
    name, _ = await nemesis.victim("stage")
    await nemesis.strike(f"a step fails on {name}")
    nemesis.cluster.break_device(name, num_steps=1)
    nemesis.heal_by(partial(_mend, nemesis, name))


async def _refuse_drain(nemesis: Nemesis) -> None:
    """A machine is drained while no other has memory to take its stage; then they have."""
    name, _ = await nemesis.victim("stage")
    heirs = set(nemesis.cluster.running) - set(await nemesis.cluster.stage_nodes())
    await nemesis.strike(f"{name} is drained, {', '.join(sorted(heirs))} have no memory")
    for heir in heirs:
        nemesis.cluster.fill_device(heir)
    draining = asyncio.ensure_future(_drain(nemesis, name))
    await asyncio.sleep(nemesis.random.uniform(0.5, 2.0))
    for heir in heirs:
        await _mend(nemesis, heir)
    await draining


async def _mend(nemesis: Nemesis, name: str) -> None:
    nemesis.note(f"the device of {name} is mended")
    nemesis.cluster.mend_device(name)


async def _nap(nemesis: Nemesis) -> None:
    """A machine sleeps without a word while others go on for it, and wakes in a cluster that has moved on."""
    name = await nemesis.victim_node("stage")
    await nemesis.strike(f"{name} sleeps")
    nemesis.cluster.fall_asleep(name)

    async def wake() -> None:
        nemesis.note(f"{name} wakes")
        nemesis.cluster.wake_up(name, slept_s=_NAP_S)

    nemesis.heal_by(wake)


MACHINE_FAULTS: dict[str, Fault] = {
    "stop node": _stop_node,
    "blink node": _blink_node,
    "kill node": _kill_node,
    "kill daemon": _kill_daemon,
    "term node": _term_engines_node,
    "announce sleep": _announce_sleep,
    "drain node": _drain_stages_node,
    "drain engine": _drain_engines_node,
    "kill stage in drain": _kill_stage_in_drain,
    "break device": _break_device,
    "fail step": _fail_step,
    "refuse drain": _refuse_drain,
    "nap": _nap,
}
