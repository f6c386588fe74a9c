"""The wheel works outside the checkout: its packages, backends, command, cluster and page."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from edgepipe_emulated import emulated_model_config

import edgepipe
from edgepipe.store.store import ModelStore
from edgepipe.weights.emulated_folder import write_model_folder
from tests.support.processes.wheels import build_wheel


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's contents, as pip lays them out."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    wheel = build_wheel(folder)
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
    assert f"edgepipe {edgepipe.__version__} " in done.stdout
    assert (installed / f"edgepipe-{edgepipe.__version__}.dist-info").is_dir()


def test_a_cluster_of_the_wheel_answers_and_serves_its_page(installed: Path, tmp_path: Path) -> None:
    write_model_folder(tmp_path / "tiny", emulated_model_config(num_layers=4, context_length=256))
    ModelStore(tmp_path / "models").pull(str(tmp_path / "tiny"))
    flags = (
        "--nodes",
        "1",
        "--backends",
        "emulated",
        "--backend-option",
        "time_factor=0",
        "--model",
        "tiny",
        "--serve",
    )
    demo = subprocess.Popen(
        [sys.executable, "-P", "-m", "edgepipe.cli", "demo", *flags, "--models-dir", str(tmp_path / "models")],
        cwd=tmp_path,
        env=os.environ
        | {"PYTHONPATH": str(installed), "HOME": str(tmp_path), "EDGEPIPE_INTERFACE": "127.0.0.1"}
        | {"EDGEPIPE_LOCAL_KEY": "no"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert demo.stdout is not None
        lines: list[str] = []
        for line in demo.stdout:
            lines.append(line)
            if "ready at http" in line:
                break
        ready = re.search(r"ready at (http://\S+)/v1", "".join(lines))
        assert ready, "".join(lines)
        with httpx.Client(base_url=ready.group(1), timeout=30, trust_env=False, verify=False) as http:
            index = http.get("/", headers={"accept": "text/html"})
            assets = re.findall(r'(?:src|href)="(/[^"]+)"', index.text)
            assert assets
            assert {http.get(asset).status_code for asset in assets} == {200}
            answer = http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 4}).json()
        assert answer["usage"]["completion_tokens"] == 4
    finally:
        demo.send_signal(signal.SIGINT)
        rest, _ = demo.communicate(timeout=60)
    assert "all stopped" in rest
    assert demo.returncode == 0
