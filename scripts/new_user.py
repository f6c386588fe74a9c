"""A new user's way: from a folder of wheels to the first answer on the page. Each step is timed."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from figures import Row, below

from edgepipe.store.store import ModelStore
from tests.support.processes.bare_machine import BareMachine
from tests.support.processes.wheels import build_wheel, pack_dependencies

LIMIT_S = 180.0
_MODEL_S = 120.0  # kernels compile, weights are repacked, the first time only
_PACKAGES = ("edgepipe", "torch", "llvmlite")


def _model() -> Path:
    store = ModelStore(Path(os.environ.get("EP_TEST_MODELS", "~/.cache/edgepipe-tests")).expanduser())
    return store.resolve("demo").path / "model.gguf"


async def first_answer(opened: Any) -> list[Row]:
    """Install from wheels on a bare machine, set up, chat in a browser. The model is a file that is already here."""
    with tempfile.TemporaryDirectory(prefix="new-user-") as scratch:
        wheels = Path(scratch) / "wheels"
        wheels.mkdir()
        build_wheel(wheels)
        pack_dependencies(wheels, of=_PACKAGES)
        machine = BareMachine(Path(scratch) / "machine")
        machine.environment |= {"EDGEPIPE_INTERFACE": "127.0.0.1", "EDGEPIPE_LOCAL_KEY": "no", "EDGEPIPE_PORT": "0"}
        machine.environment |= {"EDGEPIPE_HTTP_PORT": "0", "EDGEPIPE_DISCOVERY": "no"}
        before = os.getloadavg()[0]
        install_s = _timed(lambda: _must(machine.install("--from", str(wheels), "--yes")))
        flags = ("--yes", "--name", "studio", "--cluster", "home", "--model", str(_model()))
        setup_s = _timed(lambda: machine.edgepipe("setup", *flags))
        try:
            began_s = time.perf_counter()
            page = await (await opened.new_context()).new_page()
            await page.goto(machine.edgepipe("open", "--show").split()[0])
            await page.click("a[href='#chat']")
            await page.wait_for_selector("#model option:not([value=''])", state="attached")
            await page.fill("textarea[aria-label=Message]", "What is the capital of France?")
            await page.keyboard.press("Enter")
            await page.wait_for_selector(".figures-line", timeout=_MODEL_S * 1e3)
            answer_s = time.perf_counter() - began_s
            print("answer:", (await page.locator(".message.assistant").inner_text())[:200], file=sys.stderr)
        finally:
            machine.run(str(machine.program), "node", "stop")
    return [
        Row("new user: load of the machine before (processes that want a core)", before, ""),
        Row("new user: install", install_s, "s"),
        Row("new user: setup, with the model from a file", setup_s, "s"),
        Row("new user: page, model loaded, first answer", answer_s, "s"),
        below("new user: all", install_s + setup_s + answer_s, "s", LIMIT_S),
    ]


def _timed(act: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    act()
    return time.perf_counter() - began_s


def _must(done: CompletedProcess[str]) -> None:
    if done.returncode != 0:
        raise RuntimeError(done.stdout + done.stderr)
