"""``edgepipe chat NAME`` for a model that no machine has: one question, then the model answers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from edgepipe.store.store import StoredModel
from tests.e2e.test_node_commands import NODE
from tests.support.models.fake_hub import FakeHub, running
from tests.support.processes.bad_input import Shell
from tests.support.processes.terminal import Terminal


@pytest.mark.long  # about 30 s; short forms: tests/unit/cli/test_type_choice.py, test_offering.py
def test_chat_fetches_serves_and_talks_after_one_question(tmp_path: Path, demo_model: StoredModel) -> None:
    shell = Shell(tmp_path)
    data = (demo_model.path / "model.gguf").read_bytes()
    files = {"Qwen3-8B-Q4_K_M.gguf": data, "Qwen3-8B-Q8_0.gguf": data + bytes(64)}
    torch = [word if word != "none" else "torch" for word in NODE]
    try:
        started = shell.run("node", "start", "--background", *torch)
        assert started.returncode == 0, started.stderr
        with running(FakeHub(repo="Qwen/Qwen3-8B-GGUF", files=files)) as hub:
            environment = os.environ | shell.environment() | {"HF_ENDPOINT": hub.endpoint}
            command = [sys.executable, "-P", "-m", "edgepipe.cli", "chat", "qwen3:8b"]
            with Terminal(command, environment=environment, columns=100, timeout_s=120) as terminal:
                shown = terminal.until("Fetch which type?")
                assert "98.4 MB  fits, recommended" in shown
                terminal.send("\r")
                terminal.until("Qwen/Qwen3-8B-GGUF:q4_k_m on 1 node")
                terminal.until(">>>")
                terminal.send("Say hi\r")
                terminal.until("first word")
                terminal.send("/bye\r")
                assert terminal.exit_code() == 0
    finally:
        shell.run("node", "stop")
