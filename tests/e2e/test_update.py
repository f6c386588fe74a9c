"""``edgepipe update`` on machines where uv, pip, pipx or git brought edgepipe, with nodes that run meanwhile."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
from edgepipe_emulated import emulated_model_config

import edgepipe
from edgepipe.cluster.founding import found_local_cluster
from tests.support.processes.bad_input import Shell, emulated_model
from tests.support.processes.bare_machine import BareMachine, newer_wheels
from tests.support.processes.user_systemd import user_systemd
from tests.support.processes.wheels import ROOT, build_wheel, pack_dependencies

FLAGS = ("--name", "studio", "--port", "0", "--http-port", "0", "--no-discovery")
NEWER = "99.1"
BOTH = {edgepipe.__version__, NEWER}
BUILDS = ("hatchling", "editables")  # a checkout is built with them

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]  # an environment is made, then another version put into it


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with edgepipe's wheel and those of all that it needs."""
    folder = tmp_path_factory.mktemp("all wheels")
    build_wheel(folder)
    pack_dependencies(folder)
    return folder


@pytest.fixture(scope="module")
def newer(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same wheels, edgepipe's with another version."""
    return newer_wheels(wheels, tmp_path_factory.mktemp("newer") / "wheels", version=NEWER)


@pytest.fixture(params=["uv", "pip", "pip of uv", "pipx"])
def machine(request: pytest.FixtureRequest, wheels: Path, tmp_path: Path) -> BareMachine:
    """A machine where that program has installed edgepipe from the folder."""
    machine = BareMachine(tmp_path)
    machine.environment |= {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": wheels.as_uri(),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    if request.param == "uv":
        machine.must("sh", str(ROOT / "scripts" / "install.sh"), "--from", str(wheels), "--extra", "none", "--yes")
    elif request.param == "pipx":
        install_with_pipx(machine, wheels)
    else:
        place = machine.home / "environment"
        machine.program = place / "bin" / "edgepipe"
        if request.param == "pip":
            machine.must(sys.executable, "-m", "venv", str(place))
            machine.must(str(place / "bin" / "python"), "-m", "pip", "install", "-q", "edgepipe")
        else:
            machine.must("uv", "venv", "-q", "--python", sys.executable, str(place))
            source = ("--no-index", "--find-links", str(wheels), "edgepipe")
            machine.must("uv", "pip", "install", "-q", "--python", str(place / "bin" / "python"), *source)
    return machine


def install_with_pipx(machine: BareMachine, wheels: Path) -> None:
    if shutil.which("pipx") is None:
        pytest.skip("pipx is not installed")
    machine.give("pipx")
    machine.environment["PIPX_DEFAULT_BACKEND"] = "uv"
    if machine.run("pipx", "environment", "--value", "PIPX_DEFAULT_BACKEND").returncode != 0:
        pytest.skip("this pipx has no backend but pip, whose first use needs a network")
    (wheel,) = wheels.glob("edgepipe-*.whl")
    machine.must("pipx", "install", "--pip-args", f"--no-index --find-links {wheels.as_uri()}", str(wheel))


def own_member(machine: BareMachine) -> dict[str, Any]:
    """What the running node says of itself."""
    members = json.loads(machine.edgepipe("status", "--json"))["members"]
    return next(member["node"] for member in members if member["self"])


def test_an_update_restarts_the_node_as_it_was_started(machine: BareMachine, newer: Path) -> None:
    machine.environment["EDGEPIPE_INTERFACE"] = "127.0.0.1"
    started = machine.edgepipe("node", "start", "--background", *FLAGS, "--json")
    try:
        del machine.environment["EDGEPIPE_INTERFACE"]  # the node's own environment has it
        planned = machine.edgepipe("update", "--from", str(newer), "--dry-run")
        assert "would then restart the node" in planned
        assert own_member(machine)["edgepipe_version"] == edgepipe.__version__

        text = machine.edgepipe("update", "--from", str(newer))
        assert f"edgepipe {NEWER} is installed (before: {edgepipe.__version__})" in text
        assert "the node runs again, at 127.0.0.1:" in text
        own = own_member(machine)
        assert (own["name"], own["edgepipe_version"]) == ("studio", NEWER)
        assert json.loads(started)["node_id"] == own["node_id"]
        log = (machine.home / ".local/share/edgepipe/node.log").read_text()
        assert "node stops" in log
        assert "Traceback" not in log
    finally:
        machine.run(str(machine.program), "node", "stop")


def test_an_extra_is_added_to_the_version_that_is_installed(machine: BareMachine, wheels: Path) -> None:
    pack_dependencies(wheels, of=("matplotlib",))
    machine.environment |= {"UV_NO_INDEX": "1", "UV_FIND_LINKS": str(wheels)}  # what a user's index is
    plot = ("simulate", "--devices", "rtx4090", "--as-model", "qwen3-8b", "--requests", "2", "--plot", "a.svg")
    before = machine.run(str(machine.program), *plot)
    assert before.returncode != 0
    assert "edgepipe update --extra plot" in before.stdout + before.stderr
    assert f"edgepipe {edgepipe.__version__} has plot now" in machine.edgepipe("update", "--extra", "plot")
    machine.edgepipe(*plot)
    assert "has this already" in machine.edgepipe("update", "--extra", "plot")


@pytest.mark.parametrize("machine", ["pip"], indirect=True)
def test_a_node_that_runs_older_files_than_the_disk_has_is_restarted(machine: BareMachine, newer: Path) -> None:
    machine.environment["EDGEPIPE_INTERFACE"] = "127.0.0.1"
    machine.edgepipe("node", "start", "--background", *FLAGS)
    try:
        pip = (str(machine.program.parent / "python"), "-m", "pip", "install", "-q", "--upgrade")
        machine.must(*pip, "--find-links", str(newer), "edgepipe")  # by hand
        assert own_member(machine)["edgepipe_version"] == edgepipe.__version__
        text = machine.edgepipe("update", "--from", str(newer))
        assert f"the node still runs edgepipe {edgepipe.__version__}" in text
        assert own_member(machine)["edgepipe_version"] == NEWER
        assert "nothing has changed" in (last := machine.edgepipe("update", "--from", str(newer)))
        assert "the node runs again" not in last
    finally:
        machine.run(str(machine.program), "node", "stop")


@pytest.mark.parametrize("how", ["script", "pip", "editable"])
def test_a_clone_is_pulled_though_its_version_has_not_changed(how: str, wheels: Path, tmp_path: Path) -> None:
    if any(find_spec(name) is None for name in BUILDS):
        pytest.skip("editables is not installed, with which a checkout is built")
    machine = BareMachine(tmp_path / "machine", tools=("git",))
    folder = tmp_path / "wheels"
    folder.mkdir()
    for wheel in wheels.glob("*.whl"):
        if not wheel.name.startswith("edgepipe-"):
            (folder / wheel.name).symlink_to(wheel)
    pack_dependencies(folder, of=BUILDS)
    machine.environment |= {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": folder.as_uri(),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    settings = tmp_path / "uv.toml"
    settings.write_text(f'no-index = true\nfind-links = ["{folder.as_uri()}"]\n')
    machine.environment["UV_CONFIG_FILE"] = str(settings)
    origin, clone = tmp_path / "origin", machine.home / "edgepipe"
    copy_of_checkout(origin)
    git(machine, origin, "init", "--quiet", "--initial-branch", "main")
    commit(machine, origin, "first")
    git(machine, origin, "clone", "--quiet", str(origin), str(clone))
    if how == "script":
        machine.must("sh", str(clone / "scripts" / "install.sh"), "--extra", "none", "--yes")
    else:
        place = machine.home / "environment"
        machine.program = place / "bin" / "edgepipe"
        machine.must(sys.executable, "-m", "venv", str(place))
        editable = ("--editable",) if how == "editable" else ()
        machine.must(str(place / "bin" / "python"), "-m", "pip", "install", "-q", *editable, str(clone))

    (origin / "edgepipe" / "cli" / "version.py").write_text("def version() -> None:\n    print('the second commit')\n")
    commit(machine, origin, "second")
    text = machine.edgepipe("update")
    assert f"edgepipe {edgepipe.__version__} is installed; its files are newer than before" in text
    assert machine.edgepipe("version") == "the second commit\n"

    if how != "editable":
        shutil.rmtree(clone)
        done = machine.run(str(machine.program), "update")
        assert done.returncode == 2
        assert f"the checkout {clone}, which is gone" in " ".join(done.stderr.split())


def copy_of_checkout(folder: Path) -> None:
    """Copy what a build and the script need."""
    for part in ("edgepipe", "backends"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "scripts").mkdir()
    for file in ("pyproject.toml", "README.md", "LICENSE", "scripts/install.sh"):
        shutil.copy(ROOT / file, folder / file)


def commit(machine: BareMachine, folder: Path, message: str) -> None:
    git(machine, folder, "add", "--all")
    git(machine, folder, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message", message)


def git(machine: BareMachine, folder: Path, *arguments: str) -> None:
    machine.must("git", "-C", str(folder), *arguments)


@pytest.fixture
def with_systemd(wheels: Path, tmp_path: Path) -> Iterator[BareMachine]:
    """A machine with edgepipe and a systemd, whose commands run beside it."""
    machine = BareMachine(tmp_path, tools=("nsenter", "systemctl", "journalctl"))
    machine.give("loginctl", program="true")  # lingering is logind's, which a manager of a user lacks
    with user_systemd(machine.home) as prefix:
        machine.enter(*prefix)
        machine.must("sh", str(ROOT / "scripts" / "install.sh"), "--from", str(wheels), "--extra", "none", "--yes")
        for name, value in (
            ("name", "studio"),
            ("interface", "127.0.0.1"),
            ("discovery", "no"),
            ("port", "0"),
            ("http_port", "0"),
        ):
            machine.edgepipe("config", "set", name, value)
        yield machine


def test_an_update_restarts_a_service_through_its_manager(with_systemd: BareMachine, newer: Path) -> None:
    machine = with_systemd
    machine.edgepipe("node", "start", "--background", "--threads", "1")
    text = machine.edgepipe("service", "install")
    assert "the service has its settings, not its flags (--threads 1)" in text
    before = json.loads(machine.edgepipe("service", "status", "--json"))
    assert before["state"] == "active"

    text = machine.edgepipe("update", "--from", str(newer))
    assert "the node runs again, as a service" in text
    after = json.loads(machine.edgepipe("service", "status", "--json"))
    assert after["state"] == "active"
    assert after["pid"] != before["pid"]
    assert (own_member(machine)["name"], own_member(machine)["edgepipe_version"]) == ("studio", NEWER)
    facts = machine.must("systemctl", "--user", "show", "edgepipe.service", "--property=Result,NRestarts")
    assert set(facts.split()) == {"Result=success", "NRestarts=0"}  # it ended by itself, and was started once

    machine.edgepipe("open")  # without a browser: leaves its file
    machine.edgepipe("uninstall", "--yes", "--purge-models")
    places = [machine.home / place / "edgepipe" for place in (".local/share", ".config", ".cache")]
    assert not [place for place in places if place.exists()]
    assert machine.run("systemctl", "--user", "is-active", "edgepipe.service").returncode != 0
    assert not (machine.home / ".config/systemd/user/edgepipe.service").exists()


@pytest.mark.parametrize("machine", ["uv"], indirect=True)
def test_answers_go_on_while_one_of_their_machines_is_updated(
    machine: BareMachine, newer: Path, tmp_path: Path
) -> None:
    first = Shell(tmp_path / "first")
    emulated_model(first, emulated_model_config(num_layers=6, context_length=4096))
    found_local_cluster([first.data_dir, machine.home / ".local/share/edgepipe"], name="home")
    machine.environment |= {"EDGEPIPE_INTERFACE": "127.0.0.1", "EDGEPIPE_LOCAL_KEY": "no"}
    emulated = ("--backend", "emulated", "--backend-option", "time_factor=0")
    with first.node(*emulated, "--name", "first") as node:
        machine.edgepipe("node", "start", "--background", *FLAGS, *emulated, "--peer", node.address)
        try:
            first.until(lambda status: [m["node"]["devices"][0]["state"] for m in status["members"]] == ["idle"] * 2)
            assert first.run("serve", "tiny", "--plan", "first:0-2,studio:3-5").returncode == 0
            with Answers(node.url) as answers:
                text = machine.edgepipe("update", "--from", str(newer))
            assert f"edgepipe {NEWER} is installed" in text
            assert len(answers.tokens) > 1
            assert set(answers.tokens) == {Answers.NUM_TOKENS}
            first.until(lambda status: {m["node"]["edgepipe_version"] for m in status["members"]} == BOTH)
            shown = " ".join(first.run("status").stdout.split())
            assert f"first runs edgepipe {edgepipe.__version__}, another node {NEWER}" in shown
        finally:
            machine.run(str(machine.program), "node", "stop")


class Answers:
    """Asks for one answer after the other, inside the block and to the end of the last one."""

    NUM_TOKENS = 500

    def __init__(self, url: str) -> None:
        self.tokens: list[int] = []
        self._url = url
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="answers")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._thread.join()

    def _ask(self) -> None:
        body = {"prompt": "hello", "max_tokens": self.NUM_TOKENS, "ignore_eos": True}
        with httpx.Client(base_url=self._url, timeout=60, trust_env=False, verify=False) as http:
            while not self._end.is_set():
                answer = http.post("/v1/completions", json=body).json()
                self.tokens.append(answer.get("usage", {}).get("completion_tokens", answer))
