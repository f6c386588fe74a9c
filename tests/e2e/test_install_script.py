"""``scripts/install.sh`` and ``edgepipe update`` on a machine that has nothing: no network, no Python."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import edgepipe
from tests.support.processes.wheels import ROOT, build_wheel, later_wheel, pack_dependencies

SCRIPT = ROOT / "scripts" / "install.sh"
TOOLS = ("sh", "cat", "dirname", "basename", "env", "find", "grep", "head", "mktemp", "rm", "uname", "unshare")
NO_NETWORK = ("unshare", "--net") if os.getuid() == 0 else ("unshare", "--map-root-user", "--net")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with edgepipe's wheel and those of all that it needs."""
    folder = tmp_path_factory.mktemp("all wheels")
    build_wheel(folder)
    pack_dependencies(folder)
    return folder


class Machine:
    """A home without Python: commands see a few tools of the system, uv, and a Python that uv keeps for itself."""

    def __init__(self, folder: Path, *, with_uv: bool = True) -> None:
        self.home = folder / "home"
        self._tools = folder / "tools"
        version = ".".join(map(str, sys.version_info[:3]))
        libc = "gnu" if sys.platform == "linux" else "none"
        python = folder / "pythons" / f"cpython-{version}-{sys.platform}-{os.uname().machine}-{libc}"
        for made in (self.home, self._tools, python):
            made.mkdir(parents=True)
        for part in Path(sys.base_prefix).iterdir():
            (python / part.name).symlink_to(part)
        for tool in TOOLS:
            (self._tools / tool).symlink_to(shutil.which(tool) or tool)
        if with_uv:
            (self._tools / "uv").symlink_to(shutil.which("uv") or "uv")
        self.environment = {
            "HOME": str(self.home),
            "PATH": str(self._tools),
            "UV_PYTHON_INSTALL_DIR": str(folder / "pythons"),
        }

    @property
    def program(self) -> Path:
        return self.home / ".local/bin/edgepipe"

    def install(self, *arguments: str, within: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        return self.run(*within, "sh", str(SCRIPT), *arguments)

    def edgepipe(self, *arguments: str) -> str:
        done = self.run(str(self.program), *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env=self.environment,
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=100,
            start_new_session=True,  # without a terminal
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def needs_a_namespace() -> None:
    if subprocess.run([*NO_NETWORK, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("unshare cannot make a network namespace here")


def test_it_installs_from_a_folder_without_network_and_removes_what_it_installed(
    machine: Machine, wheels: Path
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


@pytest.mark.long
def test_an_update_restarts_the_node_as_it_was_started(machine: Machine, wheels: Path, tmp_path: Path) -> None:
    assert machine.install("--from", str(wheels), "--extra", "none", "--yes").returncode == 0
    newer = tmp_path / "newer"
    newer.mkdir()
    for wheel in wheels.glob("*.whl"):
        if wheel.name.startswith("edgepipe-"):
            later_wheel(wheel, newer, version="99.1")
        else:
            (newer / wheel.name).symlink_to(wheel)
    machine.environment["EDGEPIPE_INTERFACE"] = "127.0.0.1"
    flags = ("--name", "studio", "--port", "0", "--http-port", "0", "--no-discovery")
    machine.edgepipe("node", "start", "--background", *flags)
    try:
        del machine.environment["EDGEPIPE_INTERFACE"]  # the node's own environment has it
        assert "would then restart the node" in machine.edgepipe("update", "--from", str(newer), "--dry-run")
        text = machine.edgepipe("update", "--from", str(newer))
        assert f"edgepipe 99.1 is installed (before: {edgepipe.__version__})" in text
        assert "the node runs again, at 127.0.0.1:" in text
        (member,) = json.loads(machine.edgepipe("status", "--json"))["members"]
        assert (member["node"]["name"], member["node"]["edgepipe_version"]) == ("studio", "99.1")
        assert "nothing has changed: edgepipe 99.1 is the newest version there" in machine.edgepipe("update")
    finally:
        machine.run(str(machine.program), "node", "stop")


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
    machine: Machine, arguments: tuple[str, ...], words: str
) -> None:
    done = machine.install("--dry-run", *(argument.format(root=ROOT) for argument in arguments))
    assert done.returncode == 0, done.stderr
    assert words.format(root=ROOT) in done.stdout
    assert list(machine.home.rglob("*")) == []


def test_a_dry_run_without_uv_names_how_uv_comes(tmp_path: Path) -> None:
    done = Machine(tmp_path, with_uv=False).install("--dry-run")
    assert "uv, which installs Python programs" in done.stdout
    assert "curl -LsSf https://astral.sh/uv/install.sh | sh" in done.stdout


def test_under_wsl2_it_names_mirrored_networking(machine: Machine, tmp_path: Path) -> None:
    kernel = tmp_path / "osrelease"
    kernel.write_text("6.6.87.2-microsoft-standard-WSL2\n")
    machine.environment["EP_KERNEL_NAME_FILE"] = str(kernel)
    assert "networkingMode=mirrored" in machine.install("--dry-run").stdout


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
def test_wrong_arguments_are_refused_with_a_next_step(machine: Machine, arguments: tuple[str, ...], words: str) -> None:
    done = machine.install(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "   try: " in done.stderr


def test_without_a_release_no_unknown_package_of_that_name_is_installed(machine: Machine, tmp_path: Path) -> None:
    alone = tmp_path / "install.sh"
    alone.write_text(SCRIPT.read_text().replace("RELEASED=yes", "RELEASED=no"))
    done = subprocess.run(["sh", str(alone)], env=machine.environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert "edgepipe has no release yet" in done.stderr
