"""A command starts fast: it imports only what it needs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from edgepipe.cli.verbs import VERBS
from tests.support.processes.command_line import Run
from tests.support.processes.every_verb import every_verb

PRINT_MODULES = """
import sys
from edgepipe.cli.__main__ import start
try:
    start()
except SystemExit:
    pass
print(*sorted(sys.modules), file=sys.__stderr__)
"""
HEAVY = {"torch", "mlx", "transformers", "huggingface_hub", "tokenizers", "starlette", "uvicorn", "zeroconf"}
NUMBERS, KEYS, NETWORK, PICTURES = {"numpy"}, {"cryptography"}, {"grpc", "cryptography", "google"}, {"rich"}


def start(
    words: list[str], folder: Path, more: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    """Run ``edgepipe WORDS`` with settings from an empty folder; stderr ends with the names of the loaded modules."""
    homes = dict.fromkeys(("EDGEPIPE_DATA_DIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "HOME"), str(folder))
    return subprocess.run(
        [sys.executable, "-P", "-c", PRINT_MODULES, *words],
        capture_output=True,
        text=True,
        env={**homes, "PATH": "/usr/bin:/bin", **more},
        timeout=60,
        check=True,
    )


@pytest.mark.parametrize(
    ("words", "without", "most"),
    [
        (["--help"], HEAVY | NUMBERS | NETWORK | PICTURES | {"pydantic"}, 240),
        (["serve", "--help"], HEAVY | NUMBERS | NETWORK | PICTURES, 320),
        (["version"], HEAVY | NUMBERS | NETWORK | PICTURES, 320),
        (["status"], HEAVY | NUMBERS | KEYS, 500),
        (["peers", "list"], HEAVY | NUMBERS | KEYS, 480),
        (["plan", "qwen3:8b", "--emulate", "rtx4090"], HEAVY | NETWORK, 600),
        (["models", "list"], HEAVY | NETWORK, 600),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_imports_only_what_it_needs(words: list[str], without: set[str], most: int, tmp_path: Path) -> None:
    ran = start(words, tmp_path)
    modules = ran.stderr.splitlines()[-1].split()
    packages = {name.partition(".")[0] for name in modules}
    assert "edgepipe" in packages
    assert not packages & without
    assert len(modules) <= most


@pytest.mark.parametrize("words", ["edgepipe mod", "edgepipe models r"])
def test_the_shell_completes_verbs_without_other_verbs(words: str, tmp_path: Path) -> None:
    asked = {"_EDGEPIPE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    ran = start([], tmp_path, asked)
    assert ran.stdout.split() == (["models"] if words.endswith("mod") else ["rm", "replicate"])
    loaded = {name for name in ran.stderr.split() if name.startswith("edgepipe.cli.")}
    assert loaded.isdisjoint(f"edgepipe.cli.{verb.module or name}" for name, verb in VERBS.items() if name != "models")


def test_the_list_of_verbs_says_of_each_what_its_own_help_says() -> None:
    listed = {name: verb.help for name, verb in VERBS.items()}
    assert listed == {name: command.get_short_help_str(200) for name, command in every_verb().commands.items()}


def test_an_unknown_verb_is_compared_with_all_verbs(tmp_path: Path) -> None:
    ran = start(["statsu"], tmp_path)
    assert "no such command 'statsu'. Did you mean 'status'?" in ran.stderr


@pytest.mark.parametrize("words", [("models", "pull"), ("chat",), ("serve",), ("plan",)], ids=" ".join)
def test_the_shell_completes_known_short_names(words: tuple[str, ...], run: Run) -> None:
    command = every_verb()
    for word in words:
        command = command.commands[word]
    (model,) = (param for param in command.params if param.name == "model")
    found = model.shell_complete(command.context_class(command), "gpt-oss-2")
    assert [item.value for item in found] == ["gpt-oss-20b"]
