"""The folder ``examples``: every script runs, every file parses, and every command in it exists."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from edgepipe_emulated.oracle import next_token
from prometheus_client.parser import text_string_to_metric_families
from typer.core import TyperGroup

from tests.support.models.for_nodes import CONFIG
from tests.support.processes.bad_input import Node, Shell, emulated_model
from tests.support.processes.every_verb import every_verb

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPT = [104, 101, 108, 108, 111]
BACKEND = ("--backend", "timed", "--backend-option", "inner=emulated", "--backend-option", "every=4")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Shell, Node]]:
    """A node whose backend is the example's package, installed by pip; it loads the model ``tiny`` on request."""
    folder = tmp_path_factory.mktemp("example")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
    package = ["--no-build-isolation", "--target", str(folder / "site"), str(EXAMPLES / "custom_backend")]
    subprocess.run([*pip, *package], check=True, timeout=100)
    shell = Shell(folder, {"PYTHONPATH": str(folder / "site")})
    emulated_model(shell, CONFIG)
    with shell.node(*BACKEND, "--backend-option", "time_factor=0") as started:
        shell.run("serve", "tiny")
        yield shell, started


def test_the_custom_backend_answers_and_logs_its_steps(node: tuple[Shell, Node]) -> None:
    shell, started = node
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(
        f"{started.url}/v1/completions", json=body | {"return_token_ids": True}, timeout=90, verify=False
    )
    assert answer.status_code == 200, answer.text
    tokens = list(PROMPT)
    for _ in range(8):
        tokens.append(next_token(tokens, CONFIG))
    assert answer.json()["choices"][0]["token_ids"] == tokens[len(PROMPT) :]
    log = (shell.data_dir / "node.log").read_text()
    assert re.search(r"edgepipe_timed steps=4 tokens=\d+ mean=\d+\.\d\d ms slowest=\d+\.\d\d ms", log), log


def test_the_openai_client_streams_calls_a_tool_and_fills_a_schema(node: tuple[Shell, Node]) -> None:
    _, started = node
    done = run_script("openai_client.py", f"{started.url}/v1", "--model", "tiny")
    assert re.search(r"\(\d+ tokens\)\n--- tool call\n", done), done
    assert re.search(r"get_weather\('(Oslo|Lima)'\) -> -?\d+ degrees", done), done
    assert re.search(r"--- JSON schema\n.* in .* has \d+ inhabitants\n$", done, re.DOTALL), done


def test_the_dashboard_shows_metrics_that_nodes_have(node: tuple[Shell, Node]) -> None:
    _, started = node
    text = httpx.get(f"{started.url}/metrics", timeout=30, verify=False).text
    known: set[str] = set()
    for family in text_string_to_metric_families(text):
        endings = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        known |= {family.name + ending for ending in endings}
    dashboard = json.loads((EXAMPLES / "grafana" / "dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    queries += [variable["definition"] for variable in dashboard["templating"]["list"] if "definition" in variable]
    used = {name for query in queries for name in re.findall(r"\bedgepipe_\w+", query)}
    assert len(used) > 20
    assert used <= known, used - known


def test_the_emulated_cluster_is_drawn(tmp_path: Path) -> None:
    done = run_script("emulated_cluster.py", "--plot", str(tmp_path / "out.png"))
    rates = [int(rate) for rate in re.findall(r"█ +(\d+) +\d+%$", done, re.MULTILINE)]
    assert len(rates) == 4
    assert rates == sorted(rates, reverse=True), "slower links give fewer tokens"
    assert rates[0] > rates[-1] > 0
    (with_processes,) = re.findall(r"^  edgepipe (.*)$", done, re.MULTILINE)
    parse(shlex.split(with_processes))
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_two_nodes_pair_and_answer_and_are_stopped(tmp_path: Path, models_dir: Path) -> None:
    settings = {"EDGEPIPE_BACKEND": "emulated", "EDGEPIPE_MODELS_DIR": str(models_dir)}
    environment = Shell(tmp_path, settings).environment() | {"PATH": with_bin(Path(sys.executable).parent)}
    try:
        done = run_two_nodes(tmp_path, environment)
        assert done.returncode == 0, done.stdout + done.stderr
        assert re.search(r"'studio' joined.*demo is ready: layers .* on .*stopped demo", done.stdout, re.DOTALL), done
        assert "100 tok" in done.stderr
        assert done.stdout.endswith(2 * "the node has stopped\n")
        assert not nodes_of(tmp_path)
        assert not list((tmp_path / "temporary").iterdir())
    finally:
        for process in nodes_of(tmp_path):
            process.kill()


STUB = """#!/usr/bin/env bash
{ printf '%q ' "$@"; echo; } >> "$CALLS"
case "$1 $2" in
  "node invite") echo "  not found there?        edgepipe node join --host 127.0.0.1:7133 4821-9037" ;;
  "$FAILS") exit 6 ;;
esac
"""


@pytest.mark.parametrize(("fails", "code"), [("nothing", 0), ("serve demo", 6)])
def test_two_nodes_types_what_exists_and_stops_both_nodes(tmp_path: Path, fails: str, code: int) -> None:
    stub = tmp_path / "bin" / "edgepipe"
    stub.parent.mkdir()
    stub.write_text(STUB)
    stub.chmod(0o755)
    calls = tmp_path / "calls"
    done = run_two_nodes(tmp_path, {"PATH": with_bin(stub.parent), "CALLS": str(calls), "FAILS": fails})
    assert done.returncode == code, done.stderr
    made = [shlex.split(line) for line in calls.read_text().splitlines()]
    for call in made:
        parse(call)
    verbs = [" ".join(call[:2]) for call in made]
    assert ("chat demo" in verbs) == (code == 0)
    assert verbs[-2:] == ["node stop", "node stop"]
    assert {Path(call[-1]).name for call in made[-2:]} == {"gamer", "studio"}
    assert made[verbs.index("node join")][2:5] == ["--host", "127.0.0.1:7133", "4821-9037"]
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.md")), ids=lambda path: path.parent.name)
def test_commands_in_the_guides_exist(path: Path) -> None:
    commands = re.findall(r"(?:^|`)(edgepipe [^`#\n]*)", path.read_text(), re.MULTILINE)
    for words in map(shlex.split, commands):
        parse(words[1:])


def test_settings_files_parse() -> None:
    prometheus = yaml.safe_load((EXAMPLES / "grafana" / "prometheus.yml").read_text())
    assert prometheus["scrape_configs"][0]["static_configs"] == [{"targets": ["127.0.0.1:8117"]}]
    (model,) = yaml.safe_load((EXAMPLES / "continue" / "config.yaml").read_text())["models"]
    assert model["apiBase"] == "http://127.0.0.1:8117/v1"


def run_script(name: str, *arguments: str) -> str:
    """What an example prints."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_two_nodes(folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run ``two_nodes.sh`` with its temporary folder in ``folder``."""
    temporary = folder / "temporary"
    temporary.mkdir()
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("EDGEPIPE_", "XDG_"))}
    return subprocess.run(
        ["bash", str(EXAMPLES / "two_nodes.sh")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=kept | environment | {"TMPDIR": str(temporary)},
    )


def with_bin(folder: Path) -> str:
    """A PATH that begins with ``folder``."""
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def nodes_of(folder: Path) -> list[psutil.Process]:
    """Nodes with a data directory below ``folder`` that still run."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(folder) in part for part in process.info["cmdline"] or ())
    ]


@cache
def command_line() -> Any:
    """All verbs of edgepipe."""
    return every_verb()


def parse(words: list[str]) -> None:
    """Read a command line without running it. Raises a usage error for an unknown verb, flag or value."""
    command = command_line()
    while isinstance(command, TyperGroup):
        command, words = command.commands[words[0]], words[1:]
    command.make_context(command.name, words)
