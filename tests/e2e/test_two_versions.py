"""Two versions of edgepipe in one cluster: the second one is a copy of the package with other numbers in it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from edgepipe_emulated import emulated_model_config

from edgepipe import PROTOCOL_VERSION, __version__
from edgepipe.cluster.founding import found_local_cluster
from tests.support.processes.bad_input import Node, Shell, emulated_model, error_of
from tests.support.processes.wheels import ROOT

CONFIG = emulated_model_config(num_layers=6, context_length=256)
EMULATED = ("--backend", "emulated", "--backend-option", "time_factor=0")
NEXT_MINOR = f"{__version__.split('.')[0]}.{int(__version__.split('.')[1]) + 1}.0"
AFTER_NEXT = f"{__version__.split('.')[0]}.{int(__version__.split('.')[1]) + 2}.0"

pytestmark = pytest.mark.long


def second_version(folder: Path, *, version: str, protocol: int = PROTOCOL_VERSION) -> Shell:
    """A home whose edgepipe is a copy of the package with these numbers."""
    shutil.copytree(
        ROOT / "edgepipe", folder / "package" / "edgepipe", ignore=shutil.ignore_patterns("__pycache__"), symlinks=True
    )
    numbers = folder / "package" / "edgepipe" / "__init__.py"
    text = re.sub(r'__version__ = ".*"', f'__version__ = "{version}"', numbers.read_text())
    numbers.write_text(re.sub(r"PROTOCOL_VERSION = \d+", f"PROTOCOL_VERSION = {protocol}", text))
    return Shell(folder / "home", {"PYTHONPATH": str(folder / "package")})


def answer(node: Node, *, num_tokens: int = 8) -> int:
    """Ask the node's gateway; the tokens of its answer."""
    body = {"prompt": "hello", "max_tokens": num_tokens, "ignore_eos": True}
    reply = httpx.post(f"{node.url}/v1/completions", json=body, timeout=30, trust_env=False, verify=False).json()
    return reply["usage"]["completion_tokens"]


def page_view(node: Node) -> dict[str, Any]:
    """The first view that the node's page gets."""
    with httpx.stream("GET", f"{node.url}/ui/events", timeout=30, trust_env=False, verify=False) as events:
        for line in events.iter_lines():
            if line.startswith("data: {") and "machines" in line:
                return json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ended")


@pytest.mark.parametrize(("version", "far"), [(NEXT_MINOR, False), (AFTER_NEXT, True)])
def test_versions_of_one_protocol_serve_together_and_name_who_is_behind(
    version: str, far: bool, tmp_path: Path
) -> None:
    old, new = Shell(tmp_path / "old"), second_version(tmp_path / "new", version=version)
    emulated_model(old, CONFIG)
    found_local_cluster([old.data_dir, new.data_dir], name="home")
    with (
        old.node(*EMULATED, "--name", "old") as node,
        new.node(*EMULATED, "--name", "new", "--peer", node.address) as newer,
    ):
        old.until(lambda status: [m["node"]["devices"][0]["state"] for m in status["members"]] == ["idle"] * 2)
        assert old.run("serve", "tiny", "--plan", "old:0-2,new:3-5").returncode == 0
        assert answer(node) == 8
        new.until(lambda status: [engine["state"] for engine in status["engines"]] == ["ready"])
        assert answer(newer) == 8

        advice = "(only versions at most one minor apart are tested together)"
        for shell in (old, new):
            shown = " ".join(shell.run("status").stdout.split())
            assert f"old runs edgepipe {__version__}, another node {version}" in shown
            assert "on old: edgepipe update" in shown
            assert "on new: edgepipe update" not in shown
            assert (advice in shown) is far
        for gateway in (node, newer):
            view = page_view(gateway)
            assert view["newest"] == version
            versions = {machine["name"]: machine["version"] for machine in view["machines"]}
            assert versions == {"old": __version__, "new": version}
            assert {machine["name"]: machine["apart"] for machine in view["machines"]} == {"old": far, "new": False}


@pytest.mark.parametrize("step", [1, -1])
def test_another_protocol_is_refused_by_both_sides_and_harms_nobody(step: int, tmp_path: Path) -> None:
    first, second = Shell(tmp_path / "first"), Shell(tmp_path / "second")
    other = second_version(tmp_path / "other", version=AFTER_NEXT, protocol=PROTOCOL_VERSION + step)
    for model in ("tiny", "small"):
        emulated_model(first, CONFIG, model)
    found_local_cluster([first.data_dir, second.data_dir, other.data_dir], name="home")
    with (
        first.node(*EMULATED, "--name", "first") as node,
        second.node(*EMULATED, "--name", "second", "--peer", node.address),
    ):
        first.until(lambda status: [m["node"]["devices"][0]["state"] for m in status["members"]] == ["idle"] * 2)
        assert first.run("serve", "tiny", "--plan", "first:0-2,second:3-5").returncode == 0
        assert answer(node) == 8
        with other.node("--name", "other", "--peer", node.address):
            behind = {1: "first", -1: "other"}[step]
            both = (
                f"{AFTER_NEXT} (protocol {PROTOCOL_VERSION + step})",
                f"{__version__} (protocol {PROTOCOL_VERSION})",
            )
            for shell in (first, other):
                shell.until(lambda status: bool(status["refused"]))
                shown = " ".join(shell.run("status").stdout.split())
                for words in (*both, "speak different versions of the protocol", f"on {behind}: edgepipe update"):
                    assert words in shown
            wanted = first.run("serve", "small", "--nodes", "3")
            error_of(wanted, 9, "3 nodes are wanted, 2 can compute", "other", "edgepipe update")
            assert answer(node, num_tokens=200) == 200
            error_of(other.with_variables(PYTHONPATH="").run("status"), 9, "the running node", *both)
        (engine,) = first.status()["engines"]
        assert (engine["state"], engine["recoveries"]) == ("ready", 0)
