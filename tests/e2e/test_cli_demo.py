"""``edgepipe demo`` and what one types around it: real processes on loopback, an emulated model, its oracle."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from edgepipe_emulated import emulated_model_config
from edgepipe_emulated.oracle import Oracle

from edgepipe.store.store import ModelStore
from edgepipe.weights.emulated_folder import write_model_folder
from tests.support.processes.terminal import Terminal

LAYERS, CONTEXT = 6, 256
CONFIG = emulated_model_config(num_layers=LAYERS, context_length=CONTEXT)
FAST = ("--backend-option", "time_factor=0")


@dataclass(frozen=True, slots=True)
class Shell:
    """Runs edgepipe as people do, away from their own settings."""

    home: Path
    models_dir: Path

    def environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("EDGEPIPE_")}
        return kept | {
            "HOME": str(self.home),
            "XDG_CONFIG_HOME": str(self.home),
            "COLUMNS": "80",
            "EDGEPIPE_INTERFACE": "127.0.0.1",
            "EDGEPIPE_LOCAL_KEY": "no",
        }

    def command(self, *args: str) -> list[str]:
        return [sys.executable, "-P", "-m", "edgepipe.cli", *args]

    def run(self, *args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*args),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            env=self.environment(),
        )

    def demo(self, *args: str) -> list[str]:
        flags = ("--backends", "emulated", "--model", "tiny", "--models-dir", str(self.models_dir), *FAST)
        return ["demo", *flags, *args]


@dataclass(frozen=True, slots=True)
class Demo:
    """A demo that stays up."""

    shell: Shell
    process: subprocess.Popen[str]
    cluster: str
    url: str
    data_dir: str  # folder of the first node

    def run(self, *args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return self.shell.run(*args, "--data-dir", self.data_dir, stdin=stdin)

    def end(self, number: signal.Signals) -> int:
        """Send the signal; the exit code."""
        self.process.send_signal(number)
        self.process.communicate(timeout=30)
        return self.process.returncode


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """A home with one emulated model in its store."""
    home = tmp_path_factory.mktemp("home")
    write_model_folder(home / "tiny", CONFIG)
    ModelStore(home / "models").pull(str(home / "tiny"))
    return Shell(home, home / "models")


def start_demo(shell: Shell, *args: str) -> Demo:
    """Start ``demo --serve`` and wait for its word that it is ready."""
    process = subprocess.Popen(
        shell.command(*shell.demo("--serve", *args)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=shell.environment(),
    )
    assert process.stdout is not None
    text = ""
    while "status --data-dir" not in text:
        line = process.stdout.readline()
        assert line, text
        text += line
    found = [re.search(pattern, text) for pattern in (r"cluster (\S+)", r"(http://\S+)/v1", r"--data-dir (\S+)")]
    cluster, url, data_dir = (match.group(1) for match in found if match)
    return Demo(shell, process, cluster, url, data_dir)


@pytest.fixture(scope="module")
def demo(shell: Shell) -> Iterator[Demo]:
    """One cluster for the tests that leave it as it was."""
    demo = start_demo(shell)
    yield demo
    assert demo.end(signal.SIGTERM) == 0
    assert processes_of([demo.cluster]) == []
    assert not Path(demo.data_dir).parent.exists()


def processes_of(words: Sequence[str]) -> list[psutil.Process]:
    """Processes whose command line or whose parent's has one of the words."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if any(word in line for word in words):
            found.append(process)
    return found


def oracle(prompt: Sequence[int], count: int) -> list[int]:
    """The emulated model's greedy answer."""
    model, tokens = Oracle(CONFIG), list[int]()
    model.append(prompt)
    for _ in range(count):
        tokens.append(model.next_token())
        model.append(tokens[-1:])
    return tokens


def test_a_demo_answers_from_two_nodes_and_leaves_nothing(shell: Shell) -> None:
    done = shell.run(*shell.demo("--prompt", "Who are you?", "--max-tokens", "8"))
    assert done.returncode == 0, done.stdout + done.stderr
    cluster = re.search(r"cluster (\S+)", done.stdout)
    assert cluster is not None
    for word in ("found each other", "layers 0-", ">>> Who are you?", "all stopped"):
        assert word in done.stdout
    assert "2 nodes" in done.stderr
    assert processes_of([cluster.group(1)]) == []
    assert list(Path(tempfile.gettempdir()).glob(f"edgepipe-demo-*/a/{cluster.group(1)}")) == []


def test_the_demo_s_processes_are_those_of_node_start(demo: Demo) -> None:
    nodes = processes_of([demo.cluster])
    assert sorted(" ".join(node.cmdline()).count("node start") for node in nodes) == [1, 1]
    kinds = [child.cmdline()[-1] for node in nodes for child in node.children()]
    assert kinds.count("gateway") == 2
    assert kinds.count("engine") == 1
    assert kinds.count("stage") >= 2


def test_tokens_are_those_of_the_oracle_streamed_or_whole(demo: Demo) -> None:
    prompt = list(range(40, 72))
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with httpx.Client(base_url=demo.url, timeout=30, trust_env=False, verify=False) as http:
        whole = http.post("/v1/completions", json=body).json()
        streamed = http.post("/v1/completions", json=body | {"stream": True}).text
    expected = oracle(prompt, 24)
    assert whole["choices"][0]["token_ids"] == expected
    chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]] == expected
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]


def test_status_and_ps_show_nodes_stages_and_memory(demo: Demo) -> None:
    status = json.loads(demo.run("status", "--json").stdout)
    assert sorted(member["node"]["name"] for member in status["members"]) == ["a", "b"]
    ranges = [part["layers"] for stage in status["engines"][0]["stages"] for part in stage["slices"]]
    assert (ranges[0]["start"], ranges[-1]["end"]) == (0, LAYERS)
    assert all(member["node"]["devices"][0]["reserved_bytes"] > 0 for member in status["members"])
    text = demo.run("status").stdout
    assert "healthy · 2 nodes" in text
    assert max(map(len, text.splitlines())) <= 80
    assert json.loads(demo.run("ps", "--json").stdout)[0]["model"] == "tiny"
    assert "a:" in demo.run("ps").stdout


def test_chat_prints_the_answer_and_its_figures(demo: Demo) -> None:
    done = demo.run("chat", "--prompt", "hello", "--max-tokens", "6", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    assert re.search(r"\d+ tok · .*first word [\d.]+ s · 2 nodes", done.stderr)
    piped = demo.run("chat", "--max-tokens", "6", "--temperature", "0", stdin="hello\n")
    assert piped.stdout == done.stdout
    answer = json.loads(demo.run("chat", "--prompt", "hello", "--max-tokens", "6", "--json").stdout)
    assert answer["nodes"] == 2
    assert answer["completion_tokens"] <= 6


def test_chat_on_a_terminal(demo: Demo) -> None:
    command = demo.shell.command("chat", "--data-dir", demo.data_dir, "--max-tokens", "8")
    with Terminal(command, environment=demo.shell.environment()) as terminal:
        terminal.until_prompt(">>>")
        for line, shown in (("hello", "first word"), ("/nodes", "● b"), ("/plan", "╭▶ "), ("/stats", "1 answer ·")):
            terminal.send(line + "\r")
            terminal.until(shown)
            terminal.until_prompt(">>>")
        terminal.send("/b\t")
        terminal.until(">>> /bye")
        terminal.send("\r")
        assert terminal.exit_code() == 0
        assert max(map(len, terminal.text().splitlines())) <= 80


def test_logs_come_from_the_running_node(demo: Demo) -> None:
    assert "node ready" in demo.run("logs", "-n", "2000").stdout


def test_a_killed_demo_leaves_no_node_behind(shell: Shell) -> None:
    demo = start_demo(shell, "--nodes", "1")
    nodes = processes_of([demo.cluster])
    children = [child for node in nodes if "node" in node.cmdline() for child in node.children(recursive=True)]
    assert demo.end(signal.SIGKILL) == -signal.SIGKILL
    _, alive = psutil.wait_procs([*nodes, *children], timeout=30)
    assert alive == []
    assert list(Path(demo.data_dir).parent.glob("**/*.sock")) == []
    shutil.rmtree(Path(demo.data_dir).parent)


def test_a_demo_ends_with_130_when_it_is_interrupted(shell: Shell) -> None:
    process = subprocess.Popen(
        shell.command(*shell.demo("--nodes", "1")), stdout=subprocess.PIPE, text=True, env=shell.environment()
    )
    assert process.stdout is not None
    cluster = re.search(r"cluster (\S+)", process.stdout.readline())
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert cluster is not None
    assert processes_of([cluster.group(1)]) == []


def test_a_model_is_stopped_and_served_again_by_plan(demo: Demo) -> None:
    assert demo.run("stop", "tiny").stdout == "stopped tiny\n"
    wait_for_devices(demo)
    done = demo.run("serve", "tiny", "--plan", "b:0-1,a:2-5")
    assert (done.returncode, done.stdout) == (0, "tiny is ready: layers 0-1 on b (emulated), 2-5 on a (emulated)\n")


def wait_for_devices(demo: Demo) -> None:
    """After a stop a node measures its device again before it offers it."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        members = json.loads(demo.run("status", "--json").stdout)["members"]
        if all(device["state"] == "idle" for member in members for device in member["node"]["devices"]):
            return
    pytest.fail("the devices did not become idle")
