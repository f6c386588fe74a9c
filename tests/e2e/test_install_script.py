"""``scripts/install.sh`` on a machine that has nothing: no network, no Python."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import edgepipe
from tests.support.processes.bare_machine import SCRIPT, BareMachine
from tests.support.processes.wheels import ROOT, build_wheel, pack_dependencies

NO_NETWORK = ("unshare", "--net") if os.getuid() == 0 else ("unshare", "--map-root-user", "--net")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with edgepipe's wheel and those of all that it needs."""
    folder = tmp_path_factory.mktemp("all wheels")
    build_wheel(folder)
    pack_dependencies(folder)
    return folder


@pytest.fixture
def machine(tmp_path: Path) -> BareMachine:
    return BareMachine(tmp_path)


def needs_a_namespace() -> None:
    if subprocess.run([*NO_NETWORK, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("unshare cannot make a network namespace here")


def test_it_installs_from_a_folder_without_network_and_removes_what_it_installed(
    machine: BareMachine, wheels: Path
) -> None:
    needs_a_namespace()
    done = machine.install("--from", str(wheels), "--extra", "none", "--yes", within=NO_NETWORK)
    assert done.returncode == 0, done.stderr
    assert done.stdout.index("about 100 MB") < done.stdout.index(f"edgepipe {edgepipe.__version__} ")
    assert f"next: {machine.program} setup" in done.stdout
    assert "is not in PATH" in done.stdout

    removed = machine.install("--uninstall", "--yes", within=NO_NETWORK)
    assert removed.returncode == 0, removed.stderr
    assert not machine.program.exists()
    assert not (machine.home / ".local/share/uv/tools/edgepipe").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "'>=3.11,<3.15' --reinstall-package edgepipe --torch-backend=auto '{root}[torch]'"),
        (("--from", "{root}"), "--torch-backend=auto '{root}[torch]'"),
        (("--from", "{root}", "--extra", "mlx"), "--reinstall-package edgepipe '{root}[mlx]'"),
        (("--from={root}", "--extra=none"), "--reinstall-package edgepipe {root}\n"),
        (("--from", "https://pypi.example/simple"), "--index=https://pypi.example/simple --torch-backend=auto"),
        (("--from", "git+https://git.example/e"), "'edgepipe[torch] @ git+https://git.example/e'"),
    ],
)
def test_a_dry_run_prints_the_commands_and_changes_nothing(
    machine: BareMachine, arguments: tuple[str, ...], words: str
) -> None:
    done = machine.install("--dry-run", *(argument.format(root=ROOT) for argument in arguments))
    assert done.returncode == 0, done.stderr
    assert words.format(root=ROOT) in done.stdout
    assert list(machine.home.rglob("*")) == []


def test_a_dry_run_without_uv_names_how_uv_comes(tmp_path: Path) -> None:
    done = BareMachine(tmp_path, with_uv=False).install("--dry-run")
    assert "uv, which installs Python programs" in done.stdout
    assert "curl -LsSf https://astral.sh/uv/install.sh | sh" in done.stdout


def test_under_wsl2_it_names_mirrored_networking(machine: BareMachine, tmp_path: Path) -> None:
    kernel = tmp_path / "osrelease"
    kernel.write_text("6.6.87.2-microsoft-standard-WSL2\n")
    machine.environment["EP_KERNEL_NAME_FILE"] = str(kernel)
    assert "networkingMode=mirrored" in machine.install("--dry-run").stdout


@pytest.mark.parametrize(
    ("macos", "processor", "arguments", "words"),
    [
        ("13.7.1", "arm64", (), "this Mac has macOS 13.7.1\n   try: install.sh --extra torch, or update macOS"),
        ("14.5", "x86_64", (), "MLX needs a Mac with Apple silicon\n       this Mac has x86_64"),
        ("14.0", "arm64", (), ""),
        ("26.2", "arm64", (), ""),
        ("13.7.1", "x86_64", ("--extra", "torch"), ""),
    ],
)
def test_a_mac_that_mlx_has_no_packages_for_is_told_so(
    machine: BareMachine, tmp_path: Path, macos: str, processor: str, arguments: tuple[str, ...], words: str
) -> None:
    for tool, text in (("uname", f'[ "$1" = -m ] && echo {processor} || echo Darwin'), ("sw_vers", f"echo {macos}")):
        (tmp_path / tool).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / tool).chmod(0o755)
        machine.replace(tool, tmp_path / tool)
    done = machine.install("--dry-run", *arguments)
    assert done.returncode == (2 if words else 0), done.stderr
    assert words in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--from", "missing.whl"), "there is no file missing.whl"),
        (("--from", "missing"), "there is no folder missing"),
        (("--from", "."), "is neither a checkout nor a folder with edgepipe-*.whl"),
        (("--from",), "--from needs a value"),
        (("--extra", "jax"), "--extra is torch, mlx or none"),
        (("--fast",), "install.sh has no option --fast"),
    ],
)
def test_wrong_arguments_are_refused_with_a_next_step(
    machine: BareMachine, arguments: tuple[str, ...], words: str
) -> None:
    done = machine.install(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "   try: " in done.stderr


def test_without_a_release_no_unknown_package_of_that_name_is_installed(machine: BareMachine, tmp_path: Path) -> None:
    alone = tmp_path / "install.sh"
    alone.write_text(SCRIPT.read_text().replace("RELEASED=yes", "RELEASED=no"))
    done = subprocess.run(["sh", str(alone)], env=machine.environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert "edgepipe has no release yet" in done.stderr
