"""The wheel works outside the checkout: it holds every package, declares the backends, and the command runs from it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's contents, as pip lays them out."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), str(ROOT)]
    subprocess.run(build, check=True, timeout=100)
    (wheel,) = folder.glob("edgepipe-*.whl")
    target = folder / "site"
    subprocess.run([*pip, "install", "-q", "--no-deps", "--target", str(target), str(wheel)], check=True, timeout=100)
    return target


def run(installed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python on the installed copy, from a folder that is not the checkout."""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )


def test_every_package_and_the_types_marker_are_in_the_wheel(installed: Path, tmp_path: Path) -> None:
    code = (
        "import edgepipe, edgepipe_emulated as e, edgepipe.wire.v1.node_pb2 as n; print(edgepipe.__file__, e.__file__)"
    )
    done = run(installed, tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr
    assert all(Path(path).is_relative_to(installed) for path in done.stdout.split())
    assert (installed / "edgepipe" / "py.typed").exists()
    assert not (installed / "backends").exists()


def test_backends_are_found_by_entry_point(installed: Path, tmp_path: Path) -> None:
    code = (
        "from edgepipe.backend.loader import backend_names, create_backend\n"
        "from edgepipe.backend.types import BackendOptions\n"
        "print(backend_names()); print(create_backend('emulated', BackendOptions(device='rtx4090')).profile().name)"
    )
    done = run(installed, tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr
    assert "('emulated', 'mlx', 'torch')" in done.stdout
    assert "4090" in done.stdout


def test_the_command_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    done = run(installed, tmp_path, "-c", "import sys; from edgepipe.cli.main import main; sys.exit(main())", "version")
    assert done.returncode == 0, done.stderr
    assert "0.1.0" in done.stdout
