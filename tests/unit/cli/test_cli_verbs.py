"""Verbs that need no node: what they print, and how their errors look."""

from __future__ import annotations

import errno
import io
import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import pytest
import typer

import edgepipe.cli.node_process
from edgepipe.cli import find
from edgepipe.cli.chat import verb as chat
from edgepipe.cli.demo import choose_backends, even_layers
from edgepipe.cli.options import data_dir_of
from edgepipe.cli.serve import serve_request
from edgepipe.daemon.machine.backends import installed_backends
from edgepipe.errors import ConfigInvalid, ModelUnknown, PlanInvalid
from edgepipe.ids import NodeId
from edgepipe.spec.facts import LayerRange
from edgepipe.wire.nodes import ClusterStatus
from tests.support.daemon.admin_server import FakeNode, answering
from tests.support.daemon.node_files import make_node
from tests.support.processes.command_line import Run, make_engine, make_member

VERBS = ("demo", "node", "models", "serve", "chat", "ps", "stop", "status", "logs", "simulate", "config", "version")
NODE_FLAGS = ("--name --cluster --device --backend --dtype --interface --port --http-port --peer --data-dir").split()


def test_help_names_every_verb(run: Run) -> None:
    result = run("--help")
    assert result.code == 0
    assert all(verb in result.out for verb in VERBS)


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (("node", "start"), NODE_FLAGS),
        (("serve",), ["--nodes", "--plan", "--micro-batches"]),
        (("chat",), ["[model]", "--prompt", "--max-tokens", "--temperature", "--seed", "--json", "--data-dir"]),
        (("demo",), ["--nodes", "--backends", "--model", "--prompt", "--serve", "--http-port"]),
        (("status",), ["--json"]),
        (("models", "pull"), ["--dry-run"]),
        (("config", "show"), ["--origin"]),
    ],
)
def test_commands_have_the_flags_that_are_promised(run: Run, command: tuple[str, ...], flags: list[str]) -> None:
    text = run(*command, "--help").out
    assert [flag for flag in flags if flag not in text] == []


def test_a_bare_command_says_what_stands_here_and_what_comes_next(run: Run) -> None:
    result = run()
    assert result.code == 0
    assert "not running on this machine" in result.out
    assert "edgepipe demo" in result.out
    assert max(map(len, result.out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (("run", "org/some-model"), "edgepipe chat org/some-model"),
        (("run", "demo", "why", "is it blue?"), "edgepipe chat demo --prompt 'why is it blue?'"),
        (("help",), "edgepipe --help"),
        (("help", "models", "pull"), "edgepipe models pull --help"),
        (("pull", "org/some-model"), "edgepipe models pull org/some-model"),
        (("list",), "edgepipe models list"),
        (("rm", "demo"), "edgepipe models rm demo"),
    ],
)
def test_verbs_of_other_programs_lead_to_ours(run: Run, typed: tuple[str, ...], meant: str) -> None:
    result = run(*typed)
    assert result.code == 2
    assert result.err == f"error: there is no verb '{typed[0]}'\n   try: {meant}\n"


def test_the_version_is_also_an_option(run: Run) -> None:
    result = run("--version")
    assert (result.code, result.out) == (0, run("version").out)


def test_a_model_to_talk_to_needs_no_option(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "stdin", Typed())
    status = ClusterStatus(node_id=NodeId("a"), members=(replace(make_member("a"), self=True),))
    with answering(tmp_path / "data", FakeNode(status=status)) as node:
        assert run("chat", "demo").code == ModelUnknown.exit_code
    assert node.asked_to_serve == ["demo"]


@pytest.mark.parametrize(
    ("served", "words", "code", "shown", "stopped"),
    [
        (["a"], ("stop",), 0, "stopped a", ["a"]),
        ([], ("stop",), 0, "nothing was served", []),
        (["b", "a"], ("stop",), 2, "2 models are served\n       a, b\n   try: name one", []),
        (["b", "a"], ("stop", "--all"), 0, "stopped", [""]),
        (["b", "a"], ("stop", "b"), 0, "stopped b", ["b"]),
    ],
)
def test_the_one_model_that_is_served_needs_no_name_to_be_stopped(
    run: Run,
    tmp_path: Path,
    served: list[str],
    words: tuple[str, ...],
    code: int,
    shown: str,
    stopped: list[str],
) -> None:
    status = ClusterStatus(node_id=NodeId("a"), engines=tuple(map(make_engine, served)))
    with answering(tmp_path / "data", FakeNode(status=status)) as node:
        result = run(*words)
    assert result.code == code
    assert shown in result.out + result.err
    assert node.stopped == stopped


@pytest.mark.parametrize(
    ("facts", "sampling"),
    [
        ({"id": "tiny", "sampling": {"temperature": 0.6, "top_k": 20.0}}, {"temperature": 0.6, "top_k": 20}),
        ({"id": "tiny", "sampling": {"top_p": 0.9}}, {"temperature": 0.7, "top_p": 0.9}),
        ({"id": "tiny"}, {"temperature": 0.7}),
        ({"error": {"message": "it loads"}}, {"temperature": 0.7}),
        ([], {"temperature": 0.7}),
    ],
)
async def test_a_model_is_sampled_as_its_makers_advise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: object, sampling: dict[str, float]
) -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return httpx.Response(200, json=facts)

    transport = httpx.MockTransport(answer)
    monkeypatch.setattr(httpx, "AsyncClient", partial(httpx.AsyncClient, transport=transport))
    status = ClusterStatus(
        node_id=NodeId("a"), members=(replace(make_member("a"), self=True),), engines=(make_engine("org/tiny"),)
    )
    with answering(tmp_path, FakeNode(status=status)):
        target = await find.find_target(tmp_path, "org/tiny")
    assert target.sampling == sampling
    assert [type(value) for value in target.sampling.values()] == [type(value) for value in sampling.values()]
    assert asked == ["/v1/models/org/tiny"]


def test_a_setting_is_checked_and_written(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config" / "edgepipe" / "config.toml"
    assert f"port is set in {path}" in run("config", "set", "port", "7200").out
    assert run("config", "set", "peers", "a:1,b:2").code == 0
    assert run("config", "set", "discovery", "no").code == 0
    assert path.read_text() == 'port = 7200\npeers = ["a:1", "b:2"]\ndiscovery = false\n'
    assert path.stat().st_mode & 0o077 == 0
    wrong = run("config", "set", "nmae", "x")
    assert (wrong.code, wrong.err.splitlines()[0]) == (2, "error: unknown setting 'nmae'")
    assert run("config", "set", "port", "high").code == 2
    monkeypatch.setenv("EDGEPIPE_PORT", "7300")
    assert "EDGEPIPE_PORT has another value and wins" in run("config", "set", "port", "7201").out


def test_version_for_people_and_for_scripts(run: Run) -> None:
    assert run("version").out.startswith("edgepipe ")
    assert set(json.loads(run("version", "--json").out)) == {"version", "protocol", "python", "platform", "backends"}


def test_config_show_tells_the_origin_of_each_value(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEPIPE_THREADS", "3")
    text = run("config", "show", "--origin").out
    assert any(line.split() == ["threads", "3", "env", "EDGEPIPE_THREADS"] for line in text.splitlines())
    values = json.loads(run("config", "show", "--json").out)
    assert values["threads"] == {"value": 3, "origin": "env EDGEPIPE_THREADS"}
    assert values["port"] == {"value": 7117, "origin": "default"}


def test_an_empty_store_says_how_to_fill_it(run: Run) -> None:
    assert "edgepipe models pull" in run("models", "list").out
    assert json.loads(run("models", "list", "--json").out) == []


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (("status",), 3),
        (("ps",), 3),
        (("serve", "demo"), 3),
        (("stop", "demo"), 3),
        (("stop",), 3),
        (("stop", "demo", "--all"), 2),
        (("logs",), 3),
        (("node", "stop"), 3),
        (("models", "rm", "nothing"), 7),
        (("models", "pull", "no/../such"), 7),
        (("serve", "demo", "--nodes", "1", "--plan", "a:0-1"), 2),
        (("serve", "demo", "--micro-batches", "many"), 2),
        (("serve", "demo", "--dtype", "int3"), 2),
        (("demo", "--nodes", "1", "--backends", "torch,mlx"), 2),
        (("demo", "--serve", "--prompt", "x"), 2),
        (("node", "start", "--port", "99999"), 2),
        (("node", "start", "--name", "no spaces"), 2),
        (("chat", "--temperature", "9"), 2),
        (("nothing",), 2),
        (("serve",), 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_errors_are_three_short_lines_with_the_right_code(run: Run, command: tuple[str, ...], code: int) -> None:
    result = run(*command)
    assert (result.code, result.out) == (code, "")
    assert "Traceback" not in result.err
    assert result.err.lower().startswith(("error:", "usage:"))
    if result.err.startswith("error:"):
        assert 1 <= len(result.err.splitlines()) <= 3


def test_a_socket_that_nobody_answers_is_no_node(run: Run, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "daemon.sock").touch()
    result = run("status")
    assert result.code == 3
    assert "no edgepipe node runs on this machine" in result.err


def app_that_raises(error: BaseException) -> typer.Typer:
    """A command with one verb, ``fail``."""
    app = typer.Typer(pretty_exceptions_enable=False)

    def fail() -> None:
        raise error

    app.callback()(lambda: None)
    app.command()(fail)
    return app


def test_a_mistake_of_our_own_is_one_line_and_a_traceback_only_with_debug(
    run: Run,
) -> None:
    app = app_that_raises(RuntimeError("oops \x1b[2J"))
    result = run("fail", app=app)
    assert result.code == 1
    assert len(result.err.splitlines()) == 1
    shown = run("--debug", "fail", app=app).err
    assert shown.startswith("Traceback")
    assert shown.endswith("RuntimeError: oops \\x1b[2J\n")


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (
            PermissionError(errno.EACCES, "Permission denied", "/there/x"),
            "/there/x cannot be used\n       this user has no permission",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), "the output cannot be written\n       the disk is full"),
    ],
)
def test_what_the_system_refuses_is_no_mistake_of_ours(run: Run, error: OSError, shown: str) -> None:
    result = run("fail", app=app_that_raises(error))
    assert result.code == 2
    assert result.err.startswith(f"error: {shown}")


@pytest.mark.parametrize(
    ("closed", "command", "code"), [("stdin", "setup", 2), ("stdout", "version", 0), ("stderr", "nothing", 2)]
)
def test_a_stream_that_is_closed_is_an_empty_one(
    run: Run, monkeypatch: pytest.MonkeyPatch, closed: str, command: str, code: int
) -> None:
    monkeypatch.setattr(sys, closed, None)
    assert run(command).code == code
    with getattr(sys, closed) as stream:
        assert not stream.isatty()


def test_text_in_another_encoding_is_a_question_and_no_crash(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9 \xc3\xa9"), encoding="utf-8"))
    assert run("version").code == 0
    assert chat.question_of(None) == "caf\ufffd \u00e9"
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert chat.question_of("caf\udce9") == "caf\ufffd"

    with pytest.raises(UnicodeEncodeError) as caught:
        "caf\udce9".encode()
    refused = run("fail", app=app_that_raises(caught.value))
    assert refused.code == 2
    assert refused.err.startswith("error: 'caf\\udce9' is not UTF-8 text\n")


class Typed(io.StringIO):
    """A person at a terminal who types a line, or ^C."""

    def isatty(self) -> bool:
        """As a terminal says."""
        return True

    def readline(self, size: int | None = -1, /) -> str:
        """The line."""
        if self.getvalue() == "^C":
            raise KeyboardInterrupt
        return self.getvalue()


@pytest.mark.parametrize(("typed", "code"), [("n\n", 1), ("^C", 130)])
def test_a_question_answered_with_no_is_no_mistake(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, typed: str, code: int
) -> None:
    make_node(tmp_path / "data")
    monkeypatch.setattr(sys, "stdin", Typed(typed))
    done = run("uninstall")
    assert (done.code, done.err.strip()) == (code, "nothing was changed")
    assert (tmp_path / "data" / "node.log").exists()


def test_nothing_is_removed_below_a_node_that_does_not_stop(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(edgepipe.cli.node_process, "_STOP_S", 0.0)  # no flag leads to it
    make_node(tmp_path / "data")
    (tmp_path / "data" / "daemon.lock").touch()
    with answering(tmp_path / "data", FakeNode()):
        done = run("uninstall", "--yes")
    assert done.code == 3
    assert "the node has not stopped yet" in done.err
    assert (tmp_path / "data" / "node.log").exists()


def test_an_interrupt_exits_with_130(run: Run) -> None:
    assert run("fail", app=app_that_raises(KeyboardInterrupt())).code == 130


def test_logs_of_a_stopped_node_are_what_it_left(run: Run, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "node.log").write_text("one\ntwo\nthree\n")
    assert run("logs", "-n", "2").out == "two\nthree\n"
    assert run("logs", "-f").code == 3


def test_serve_flags_become_the_request() -> None:
    request = serve_request("m", nodes=2, micro_batches="3", context=512, activations="float32")
    assert (request.options.model, request.options.num_nodes, request.plan) == ("m", 2, "")
    assert (request.options.micro_batches, request.options.settings.context_length) == (3, 512)
    assert serve_request("m", plan="a:0-1").options.micro_batches == 0


def test_backends_of_a_demo_are_repeated_over_its_nodes() -> None:
    assert choose_backends("torch,mlx", 3) == ["torch", "mlx", "torch"]
    assert choose_backends("emulated", 2) == ["emulated", "emulated"]
    with pytest.raises(ConfigInvalid):
        choose_backends("torch,mlx", 1)


@pytest.mark.parametrize("names", ["a", "ab", "abcdefg"])
def test_demo_shares_the_layers_evenly(names: str) -> None:
    parts = [part.partition(":") for part in even_layers(30, list(names)).split(",")]
    ranges = [LayerRange(int(text.partition("-")[0]), int(text.partition("-")[2]) + 1) for _, _, text in parts]
    assert "".join(name for name, _, _ in parts) == names
    assert [each.start for each in ranges] == [0, *(each.end for each in ranges[:-1])]
    assert ranges[-1].end == 30
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


def test_demo_with_more_nodes_than_layers_is_told_so() -> None:
    with pytest.raises(PlanInvalid, match="2 layers"):
        even_layers(2, ["a", "b", "c"])


def test_the_data_directory_comes_from_the_flag_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGEPIPE_DATA_DIR", str(tmp_path / "env"))
    assert data_dir_of(None) == tmp_path / "env"
    assert data_dir_of(tmp_path / "flag") == tmp_path / "flag"


def test_no_verb_loads_torch_or_mlx_or_what_help_does_not_need() -> None:
    code = (
        "import sys, edgepipe.cli.main as m\n"
        "try: m.main(['--help'])\n"
        "except SystemExit: pass\n"
        "bad = {'torch', 'mlx', 'grpc', 'httpx', 'rich', 'numpy', 'pydantic', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not bad, bad\n"
        "import edgepipe.cli.chat.repl, edgepipe.cli.local_cluster, edgepipe.cli.views.status_view\n"
        "import edgepipe.gateway.service\n"
        "assert not {'torch', 'mlx', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_only_backends_whose_packages_are_here_are_told(run: Run) -> None:
    assert installed_backends(lambda name: name != "mlx") == ("emulated", "torch")
    assert json.loads(run("version", "--json").out)["backends"] == list(installed_backends())


def test_a_served_model_may_have_names_of_its_own(run: Run, tmp_path: Path) -> None:
    with answering(tmp_path / "data", FakeNode()) as node:
        run("serve", "demo", "--name", "home", "--name", "gpt-4o:latest")
        assert node.names == [["home", "gpt-4o"]]
        assert run("serve", "demo", "--name", "qwen3:8b").code == 2
        assert node.names == [["home", "gpt-4o"]]
