"""Nodes that cannot start, do not fit together, or are asked for what they do not have."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from edgepipe_emulated import emulated_model_config

from edgepipe.cluster.identity import load_identity
from edgepipe.daemon.machine.data_dir import socket_path
from tests.support.processes.bad_input import Node, Shell, emulated_model, error_of

CONTEXT = 256
CONFIG = emulated_model_config(num_layers=6, context_length=CONTEXT)
EMULATED = ("--backend", "emulated", "--backend-option", "time_factor=0")
PLANS = {
    "a:0-1,a:3-5": "leaves out layer 2",
    "a:0-3,a:3-5": "layer 3 twice",
    "a:0-4": "covers 5 layers, the model has 6",
    "a:0-6": "covers 7 layers, the model has 6",
    "a:1-5": "leaves out layer 0",
    "z:0-5": "'z' is not a node that can compute",
    "a:5-0": "layers 5-0 are not a range",
    "a": "'a' is not a part of a plan",
    "a:0-5,": "'' is not a part of a plan",
    "a:0-x": "'a:0-x' is not a part of a plan",
}
_FEW = ("a:0-1,a:3-5", "a:0-3,a:3-5", "z:0-5", "a")  # a gap, an overlap, an unknown node, no plan


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Shell, Node]]:
    """A node with an emulated device and one model that nobody serves."""
    shell = Shell(tmp_path_factory.mktemp("home"))
    emulated_model(shell, CONFIG)
    with shell.node(*EMULATED) as node:
        shell.until(lambda status: status["members"][0]["node"]["devices"][0]["state"] == "idle")
        yield shell, node


@pytest.mark.parametrize("plan", [pytest.param(plan, marks=() if plan in _FEW else pytest.mark.long) for plan in PLANS])
def test_a_plan_that_is_no_plan_is_exit_2(plan: str, home: tuple[Shell, Node]) -> None:
    error_of(home[0].run("serve", "tiny", "--plan", plan), 2, PLANS[plan])


def test_models_and_nodes_that_are_not_there(home: tuple[Shell, Node]) -> None:
    shell, _ = home
    error_of(shell.run("serve", "nothing"), 7, "no model 'nothing' is in the cluster", "on its nodes: tiny")
    error_of(shell.run("chat", "nothing", "-p", "x"), 7, "on its nodes: tiny")
    error_of(shell.run("stop", "tiny"), 7, "'tiny' is not served")
    error_of(shell.run("serve", "tiny", "--nodes", "99"), 2, "99 nodes cannot share 6 layers", lines=(2, 3))
    error_of(shell.run("serve", "tiny", "--context", "257"), 2, "--context 257 is more", "supports 256 tokens")
    error_of(shell.run("serve", "tiny", "--nodes", "2"), 6, "2 nodes are wanted, 1 can compute")
    assert shell.status()["engines"] == []


def test_a_bare_edgepipe_with_a_node_leads_to_a_model(home: tuple[Shell, Node]) -> None:
    done = home[0].run()
    for word in ("'a' runs in cluster 'home', 1 node", "no model yet", "tiny", "edgepipe serve MODEL"):
        assert word in done.stdout


def test_what_a_served_model_cannot_do(home: tuple[Shell, Node]) -> None:
    shell, node = home
    assert shell.run("serve", "tiny").returncode == 0
    error_of(shell.run("serve", "tiny", "--plan", "a:0-2,a:3-5"), 2, "served already", "a:0-5", "edgepipe stop tiny")
    error_of(shell.run("serve", "tiny", "--nodes", "3"), 2, "served already")
    long_prompt = "x" * (CONTEXT + 1)
    error_of(shell.run("chat", "-p", long_prompt), 2, "maximum context length", str(CONTEXT), "shorten the prompt by")
    error_of(shell.run("chat", "-p", "x", "--seed", str(1 << 80)), 2, "seed", lines=(1, 2, 3))
    with httpx.Client(base_url=node.url, trust_env=False, timeout=30, verify=False) as http:
        for stream in (False, True):
            answer = http.post("/v1/completions", json={"prompt": long_prompt, "stream": stream})
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    served = shell.run().stdout
    assert "edgepipe chat" in served
    assert f"{node.url}/v1" in served
    assert shell.run("stop", "--all").returncode == 0


def test_a_model_that_fits_nowhere_is_exit_6_and_says_what_is_missing_where(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    emulated_model(shell, CONFIG)
    with shell.node(*EMULATED, "--memory-limit", "100KB"):
        shell.until(lambda status: status["members"][0]["node"]["devices"][0]["state"] == "idle")
        error_of(shell.run("serve", "tiny"), 6, "missing", "a 100.0 KB")
        error_of(shell.run("serve", "tiny", "--plan", "a:0-5"), 6, "node a lacks")
        assert shell.status()["engines"] == []


def test_a_second_node_where_one_runs(home: tuple[Shell, Node], tmp_path: Path) -> None:
    shell, node = home
    port, http_port = node.address.rpartition(":")[2], str(node.ready["http_port"])
    common = ("node", "start", "--backend", "none", "--no-discovery")
    pid = str(node.process.pid)
    error_of(shell.run(*common, "--port", "0"), 2, str(shell.data_dir), f"process id is {pid}", "--data-dir")
    other = Shell(tmp_path)
    error_of(other.run(*common, "--port", port, "--http-port", "0"), 1, f"port {port}", "--port")
    error_of(other.run(*common, "--port", "0", "--http-port", http_port), 1, f"port {http_port}", "--http-port")
    assert not socket_path(other.data_dir).exists()
    assert not (other.data_dir / "daemon.lock").exists()
    assert shell.status()["node_id"] == node.ready["node_id"]


def test_a_port_of_another_program_as_a_script_sees_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = Shell(tmp_path).run("node", "start", "--json", "--port", port, "--backend", "none")
    error_of(done, 1, port)
    assert json.loads(done.stdout)["error"]["code"] == "port_in_use"


@pytest.mark.parametrize("file", ["key.pem", "certificate.pem"])
def test_a_damaged_identity_ends_the_start_and_says_how_to_begin_anew(file: str, tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    identity = shell.data_dir / "identity"
    load_identity(identity)
    (identity / file).write_bytes(b"\xff\x00")
    error_of(shell.run("node", "start", "--backend", "none", "--port", "0"), 2, str(identity), "is damaged", "mv ")


def test_a_key_that_others_may_read_ends_the_start_with_the_command_that_mends_it(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    load_identity(shell.data_dir / "identity")
    key = shell.data_dir / "identity" / "key.pem"
    key.chmod(0o644)
    error_of(
        shell.run("node", "start", "--backend", "none", "--port", "0"), 2, "its mode is 0644", f"chmod 600 '{key}'"
    )


def test_a_path_too_long_for_a_socket_works_all_the_same(tmp_path: Path) -> None:
    folder = tmp_path / ("long-" * 20) / ("name-" * 20)
    shell = Shell(tmp_path).with_variables(EDGEPIPE_DATA_DIR=str(folder))
    with shell.node():
        assert shell.status()["data_dir"] == str(folder)
        assert socket_path(folder).exists()
    assert not socket_path(folder).exists()


def test_a_backend_whose_library_is_broken_is_told_by_status_and_serve(tmp_path: Path) -> None:
    (tmp_path / "stub" / "mlx").mkdir(parents=True)
    (tmp_path / "stub" / "mlx" / "__init__.py").write_text("raise ImportError('no libmlx.so here')")
    shell = Shell(tmp_path, {"PYTHONPATH": str(tmp_path / "stub")})
    emulated_model(shell, CONFIG)
    with shell.node("--backend", "mlx"):
        shell.until(lambda status: status["members"][0]["node"]["devices"][0]["state"] == "failed")
        shown = shell.run("status").stdout
        assert "degraded" in shown
        assert "the mlx backend cannot be" in shown
        error_of(shell.run("serve", "tiny"), 6, "no node can compute", "the mlx backend cannot be imported")
