"""Faults of single processes: stages, engines and gateways that are killed, crash or hang."""

from __future__ import annotations

import asyncio
import contextlib
import signal

import psutil

from tests.support.faults.chaos.nemesis import Fault, Nemesis


async def _kill_stage(nemesis: Nemesis) -> None:
    await _signal(nemesis, "stage", signal.SIGKILL)


async def _crash_stage(nemesis: Nemesis) -> None:
    await _signal(nemesis, "stage", signal.SIGSEGV)


async def _term_stage(nemesis: Nemesis) -> None:
    """As an upgrade would: it ends in order, and is lost all the same."""
    await _signal(nemesis, "stage", signal.SIGTERM)


async def _kill_engine(nemesis: Nemesis) -> None:
    await _signal(nemesis, "engine", signal.SIGKILL)


async def _signal(nemesis: Nemesis, kind: str, number: signal.Signals) -> None:
    name, pid = await nemesis.victim(kind)
    await nemesis.strike(f"{number.name} {kind} {pid} on {name}")
    psutil.Process(pid).send_signal(number)


async def _kill_stages_again_and_again(nemesis: Nemesis) -> None:
    """A storm: five kills, each as soon as something serves again, or sooner."""
    for turn in range(5):
        name, pid = await nemesis.victim("stage")
        if turn == 0:
            await nemesis.strike(f"SIGKILL stage {pid} on {name}")
        else:
            nemesis.note(f"SIGKILL stage {pid} on {name}")
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()
        await asyncio.sleep(nemesis.random.uniform(0.1, 1.0))


async def _kill_two_stages(nemesis: Nemesis) -> None:
    for name, pid in (await nemesis.victims("stage"))[-2:]:
        await nemesis.strike(f"SIGKILL stage {pid} on {name}")
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()


async def _kill_stage_twice(nemesis: Nemesis) -> None:
    """The second fault meets the recovery from the first."""
    await _kill_stage(nemesis)
    await asyncio.sleep(nemesis.random.uniform(0.0, 0.6))
    name, pid = await nemesis.victim("stage")
    nemesis.note(f"SIGKILL stage {pid} on {name}, in the recovery")
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).kill()


async def _stop_stage(nemesis: Nemesis) -> None:
    """It hangs; thawed, if it was not ended, it must be harmless."""
    name, pid = await nemesis.victim("stage")
    await nemesis.freeze(f"stage {pid} on {name}", [psutil.Process(pid)], thaw_s=8.0)


async def _stop_engine(nemesis: Nemesis) -> None:
    name, pid = await nemesis.victim("engine")
    await nemesis.freeze(f"engine {pid} on {name}", [psutil.Process(pid)], thaw_s=8.0)


async def _kill_gateway(nemesis: Nemesis) -> None:
    """Another node's: it has no client here."""
    name = nemesis.other_node()
    own = await nemesis.cluster.running[name].status()
    for child in own.children:
        if child.kind == "gateway":
            await nemesis.strike(f"SIGKILL gateway {child.pid} of {name}")
            psutil.Process(child.pid).kill()


PROCESS_FAULTS: dict[str, Fault] = {
    "kill stage": _kill_stage,
    "crash stage": _crash_stage,
    "term stage": _term_stage,
    "kill two stages": _kill_two_stages,
    "stage storm": _kill_stages_again_and_again,
    "kill stage twice": _kill_stage_twice,
    "kill engine": _kill_engine,
    "stop stage": _stop_stage,
    "stop engine": _stop_engine,
    "kill gateway": _kill_gateway,
}
