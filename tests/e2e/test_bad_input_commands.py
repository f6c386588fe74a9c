"""Wrong verbs, flags, settings and names, typed where no node runs: each says what to do, and makes nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edgepipe.cli.main import main
from tests.support.processes.bad_input import Done, Shell, error_of, finish

USAGE = {
    "nosuch": ("no such command 'nosuch'", "edgepipe --help"),
    "serv": ("Did you mean 'serve'",),
    "node": ("missing command", "start, ", "edgepipe node --help"),
    "status --nope": ("--nope", "edgepipe status --help"),
    "serve": ("missing argument", "edgepipe serve --help"),
    "chat --seed": ("--seed",),
    "pull tiny": ("there is no verb 'pull'", "edgepipe models pull tiny"),
    "chat --temperature -1 -p x": ("--temperature",),
    "chat --max-tokens 0 -p x": ("--max-tokens",),
    "serve x --nodes -1": ("--nodes",),
    "node start --port x": ("--port",),
}
SETTINGS = {
    "serve x --micro-batches 0": ("--micro-batches", "from 1 to"),
    "serve x --micro-batches x": ("--micro-batches",),
    "serve x --nodes 2 --plan a:0-1": ("contradict",),
    "serve x --activations int8": ("bf16 or float32",),
    "node start --peer nohost": ("HOST:PORT",),
    "node start --peer a:99999": ("HOST:PORT",),
    "node start --port 99999": ("from 0 to",),
    "node start --dtype int4": ("bfloat16",),
    "node start --memory-limit lots": ("24GB",),
    "node start --backend-option x": ("KEY=VALUE",),
    "node start --interface eth99": ("eth99", "lo 127.0.0.1"),
    "node start --backend nosuch": ("there is no backend 'nosuch'", "emulated"),
    "demo --backends torch,mlx,torch": ("3 backends for 2 nodes",),
    "stop x --all": ("--all",),
}
NO_NODE = ["status", "serve x", "ps", "stop", "stop x", "stop --all", "logs", "node stop"]
HELP = [
    "",
    "demo",
    "node start",
    "models pull",
    "serve",
    "chat",
    "ps",
    "stop",
    "status",
    "logs",
    "config show",
    "version",
]
UNKNOWN_MODELS = ["models rm nothing", "models pull /no/such/place", "models pull nothing", "models pull ./no.gguf"]


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A home where nothing is, and where nothing may appear: a refused command leaves no file."""
    yield Shell(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def here(shell: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], Done]:
    """Runs a command line in this process, which spares Python's start."""
    for name in [name for name in os.environ if name.startswith(("EDGEPIPE_", "XDG_"))]:
        monkeypatch.delenv(name)
    for name, value in shell.environment().items():
        monkeypatch.setenv(name, value)

    def run(command: str) -> Done:
        with pytest.raises(SystemExit) as ended:
            main(command.split())
        printed = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Done(command, ended.value.code, printed.out, printed.err)

    return run


@pytest.mark.parametrize("command", USAGE)
def test_a_command_line_that_cannot_be_understood_is_exit_2(command: str, here: Callable[[str], Done]) -> None:
    error_of(here(command), 2, *USAGE[command], lines=(2, 3))


@pytest.mark.parametrize("command", SETTINGS)
def test_a_value_that_cannot_be_used_is_exit_2(command: str, here: Callable[[str], Done]) -> None:
    error_of(here(command), 2, *SETTINGS[command], lines=(2, 3))


@pytest.mark.parametrize("command", NO_NODE)
def test_without_a_node_commands_say_where_they_looked(command: str, here: Callable[[str], Done], shell: Shell) -> None:
    error_of(here(command), 3, str(shell.data_dir / "daemon.sock"), "edgepipe node start")


@pytest.mark.parametrize("command", UNKNOWN_MODELS)
def test_an_unknown_model_is_exit_7(command: str, here: Callable[[str], Done]) -> None:
    error_of(here(command), 7, command.split()[-1], "edgepipe models")


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("EDGEPIPE_PORT", "abc", ("port cannot be 'abc'", "env EDGEPIPE_PORT", "from 0 to")),
        ("EDGEPIPE_PROT", "1", ("unknown setting 'prot'", "did you mean 'port'?")),
        ("EDGEPIPE_CONFIG", "/no/such/file.toml", ("/no/such/file.toml", "does not exist")),
    ],
)
@pytest.mark.parametrize("command", ["node start", "status", ""])
def test_a_bad_variable_is_named(
    command: str,
    variable: str,
    value: str,
    words: tuple[str, ...],
    here: Callable[[str], Done],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable, value)
    error_of(here(command), 2, *words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 7117", ("unknown setting 'prot'", "config.toml", "did you mean 'port'?")),
        ("port = 'x'", ("port cannot be 'x'", "'port' in file", "config.toml")),
        ("port = = 7117", ("config.toml cannot be read", "line 1")),
    ],
)
def test_a_bad_settings_file_is_named(
    text: str, words: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory, here: Callable[[str], Done]
) -> None:
    file = tmp_path_factory.mktemp("settings") / "config.toml"
    file.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGEPIPE_CONFIG", str(file))
        error_of(here("status"), 2, *words)


@pytest.mark.parametrize("folder", ["/dev/null/x", "/proc/nowhere"])
def test_a_data_directory_that_cannot_be_written_is_exit_2(folder: str, here: Callable[[str], Done]) -> None:
    error_of(here(f"node start --data-dir {folder}"), 2, folder, "--data-dir")


def test_errors_are_the_same_in_a_process_of_its_own(shell: Shell) -> None:
    error_of(shell.run("chat", "--temperature", "9", "-p", "x"), 2, "--temperature")
    error_of(shell.run("chat"), 2, "the prompt is empty", lines=(2,))
    done = shell.run("chat", "-p", "x", "nothing")
    alone = done.returncode == 4  # else some other node announces itself on this network
    words = ("mDNS", "edgepipe node start") if alone else ("found '",)
    error_of(done, 4 if alone else 3, str(shell.data_dir), *words)


def test_interrupted_while_python_starts_it_is_quiet(shell: Shell) -> None:
    process = shell.start("chat", "-p", "x")
    assert process.stdout is not None
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.returncode in (130, -signal.SIGINT)  # the latter before Python runs a line of ours
    assert done.returncode != 130 or done.stderr == ""


def test_a_bare_edgepipe_says_how_to_begin(shell: Shell) -> None:
    done = shell.run()
    assert done.returncode == 0
    for word in ("not running", "none on this disk", "edgepipe demo", "edgepipe node start"):
        assert word in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize("verb", HELP)
def test_help_fits_into_80_columns(verb: str, here: Callable[[str], Done]) -> None:
    done = here(f"{verb} --help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"Usage: edgepipe {verb}".rstrip())
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert count_undescribed(done.stdout) == []


def count_undescribed(text: str) -> list[str]:
    """Options without a word of explanation."""
    options = text.partition("Options:")[2].partition("Commands:")[0].splitlines()
    return [line for line in options if line.lstrip().startswith("-") and not line.split("  ", 2)[2:]]
