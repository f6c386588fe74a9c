"""What breaks while it runs: killed processes and ^C. Answers go on or end in clear errors, and nothing stays."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from edgepipe_emulated import emulated_model_config

from tests.support.models.bad import large_folder
from tests.support.processes.bad_input import Node, Shell, emulated_model, error_of, finish, until

SLOW = ("--backend", "emulated", "--backend-option", "time_factor=100")  # about a hundred tokens a second


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Shell, Node]]:
    """A slow node with one model, which each test serves first."""
    shell = Shell(tmp_path_factory.mktemp("home"))
    emulated_model(shell, emulated_model_config(num_layers=6, context_length=1024))
    with shell.node(*SLOW) as node:
        yield shell, node


@pytest.mark.long
@pytest.mark.parametrize("kind", ["stage", "engine"])
def test_a_killed_process_is_replaced_and_the_answer_goes_on(kind: str, home: tuple[Shell, Node]) -> None:
    shell, node = home
    assert shell.run("serve", "tiny").returncode == 0
    asked = ("chat", "-p", "hi", "--max-tokens", "40", "--temperature", "0")
    undisturbed = shell.run(*asked).stdout
    chat = shell.start(*asked)
    assert chat.stdout is not None
    first = chat.stdout.read(1)  # it answers
    node.child(kind).kill()
    done = finish(chat)
    assert (done.returncode, first + done.stdout) == (0, undisturbed)
    assert "Traceback" not in done.stderr
    assert shell.status()["engines"][0]["state"] == "ready"


def test_a_killed_gateway_is_started_again_by_its_node(home: tuple[Shell, Node]) -> None:
    shell, node = home
    assert shell.run("serve", "tiny").returncode == 0
    chat = shell.start("chat", "-p", "hi")
    assert chat.stdout is not None
    chat.stdout.read(1)
    killed = node.child("gateway")
    killed.kill()
    error_of(finish(chat), 3, "the answer broke off", node.url)
    shell.until(lambda status: _gateway_pid(status) not in (0, killed.pid))
    assert httpx.get(f"{node.url}/health", trust_env=False, verify=False).status_code == 200, "at the same port"
    assert shell.run("chat", "-p", "hi", "--max-tokens", "1").returncode == 0


def _gateway_pid(status: dict[str, list[dict[str, int]]]) -> int:
    return next(
        (child["pid"] for child in status["children"] if child["kind"] == "gateway" and child["state"] == "running"), 0
    )


def test_an_interrupted_chat_is_130_and_stops_the_work(home: tuple[Shell, Node]) -> None:
    shell, _ = home
    assert shell.run("serve", "tiny").returncode == 0
    chat = shell.start("chat", "-p", "hi")
    assert chat.stdout is not None
    chat.stdout.read(1)
    chat.send_signal(signal.SIGINT)
    done = finish(chat)
    assert (done.returncode, done.stderr) == (130, "")
    shell.until(lambda status: status["engines"][0]["running"] == 0)


def test_an_interrupted_serve_is_130_and_leaves_nothing_served(home: tuple[Shell, Node]) -> None:
    shell, node = home
    shell.run("stop", "--all")
    serve = shell.start("serve", "tiny")
    until(lambda: node.has_child("engine") or serve.poll() is not None)
    serve.send_signal(signal.SIGINT)
    done = finish(serve)
    assert done.stderr == ""
    if done.returncode != 0:  # it was not ready just before
        assert done.returncode == 130
        shell.until(lambda status: status["engines"] == [])
    assert shell.run("serve", "tiny").returncode == 0


def test_an_interrupted_pull_is_130_and_leaves_nothing(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    store = shell.data_dir / "models"
    pull = shell.start("models", "pull", str(large_folder(tmp_path / "model")))
    until(lambda: (store / ".pulling-model").is_dir() or pull.poll() is not None)
    pull.send_signal(signal.SIGINT)
    done = finish(pull)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    assert list(store.iterdir()) == []
