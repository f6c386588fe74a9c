"""``edgepipe connect``: what it prints can be used as it is, and holds no key."""

from __future__ import annotations

import json
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from edgepipe.cli.programs import PROGRAMS, Served, small_context
from edgepipe.wire.nodes import ClusterStatus
from tests.support.daemon.admin_server import FakeNode, answering
from tests.support.processes.command_line import Run, make_engine, make_status, with_engine

MODEL = "org/Llama-3.3-70B-Instruct"
SERVED = Served(base_url="http://127.0.0.1:8117", model="a 'model'", context_length=65_536)


def environment(lines: str) -> dict[str, str]:
    """The variables that a shell has after it has read the lines."""
    script = f"export ANTHROPIC_API_KEY=other\n{lines}\nenv -0"
    printed = subprocess.run(["sh", "-ec", script], capture_output=True, check=True, timeout=20).stdout.decode()
    return dict(entry.split("=", 1) for entry in printed.split("\0") if "=" in entry)


def test_a_shell_can_read_the_lines_for_claude_code(run: Run, tmp_path: Path) -> None:
    with answering(tmp_path / "data", FakeNode(status=with_engine(make_status(), context_length=65_536))):
        shown = run("connect", "claude")
    assert (shown.code, shown.err) == (0, "")
    lines, command = shown.out.rstrip().rsplit("\n", 1)
    found = environment(lines)
    assert command == "claude"
    assert found["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8117"
    assert found["ANTHROPIC_AUTH_TOKEN"]
    assert "ANTHROPIC_API_KEY" not in found
    assert found["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "65536"
    assert {value for name, value in found.items() if name.startswith("ANTHROPIC") and "MODEL" in name} == {MODEL}


def test_a_key_is_read_from_its_file_and_not_shown(run: Run, tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    data_dir.mkdir(mode=0o700)
    (data_dir / "api-key").write_text("ep-secret")
    (data_dir / "api-key").chmod(0o600)
    with answering(data_dir, FakeNode(status=make_status())):
        for program in PROGRAMS:
            shown = run("connect", program)
            as_json = run("connect", program, "--json")
            assert "ep-secret" not in shown.out + as_json.out
            assert str(data_dir / "api-key") in shown.out
            assert json.loads(as_json.out)["key_file"] == str(data_dir / "api-key")
        lines = run("connect", "anthropic").out
    assert environment(lines)["ANTHROPIC_AUTH_TOKEN"] == "ep-secret"


def test_files_of_settings_can_be_read_by_their_programs() -> None:
    codex = tomllib.loads(PROGRAMS["codex"](SERVED).content)
    assert (codex["model"], codex["model_context_window"]) == (SERVED.model, 65_536)
    assert codex["model_auto_compact_token_limit"] == 52_428
    provider = codex["model_providers"][codex["model_provider"]]
    assert (provider["base_url"], provider["wire_api"]) == ("http://127.0.0.1:8117/v1", "responses")
    opencode = json.loads(PROGRAMS["opencode"](SERVED).content)
    assert opencode["model"] == f"edgepipe/{SERVED.model}"
    assert opencode["provider"]["edgepipe"]["models"][SERVED.model]["limit"]["context"] == 65_536
    aider = json.loads(PROGRAMS["aider"](SERVED).content)
    assert aider[f"openai/{SERVED.model}"]["max_input_tokens"] == 65_536


def test_a_small_context_is_warned_of_for_agents(run: Run, tmp_path: Path) -> None:
    with answering(tmp_path / "data", FakeNode(status=make_status())):
        shown = run("connect", "claude")
        assert shown.code == 0
        assert "a context of 8,192 tokens; the first prompt of claude alone has about 21,000 tokens" in shown.err
        assert f"edgepipe serve {MODEL} --context 65536" in shown.err
        assert json.loads(run("connect", "codex", "--json").out)["warning"]
        assert run("connect", "openai").err == ""
    assert small_context("claude", SERVED) == ""


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (["emacs"], make_status(), "known: codex, claude"),
        (["claude", "other"], make_status(), "'other' is not served"),
        (["claude"], with_engine(make_status(), state="loading"), "no model is served"),
    ],
)
def test_what_cannot_be_connected_is_said(
    run: Run, tmp_path: Path, words: list[str], status: ClusterStatus, sentence: str
) -> None:
    with answering(tmp_path / "data", FakeNode(status=status)):
        shown = run("connect", *words)
    assert shown.code != 0
    assert sentence in shown.err


def test_one_of_several_models_is_named(run: Run, tmp_path: Path) -> None:
    status = make_status()
    status = replace(status, engines=(*status.engines, make_engine("org/other", names=("small",), context_length=99)))
    with answering(tmp_path / "data", FakeNode(status=status)):
        assert "name one: edgepipe connect PROGRAM MODEL" in run("connect", "openai").err
        chosen = json.loads(run("connect", "openai", "small", "--json").out)
    assert (chosen["model"], chosen["context_length"]) == ("small", 99)
