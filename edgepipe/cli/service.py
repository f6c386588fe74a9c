"""``edgepipe service install|status|logs|uninstall``"""

from __future__ import annotations

import getpass
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from edgepipe.cli.options import DEGRADED_EXIT, DataDir, Json, data_dir_of
from edgepipe.cli.output import print_json
from edgepipe.cli.service_plan import Manager, ServiceFacts, ServiceSetup, make_plan
from edgepipe.config import asking_user
from edgepipe.errors import ClusterError, ConfigInvalid, EdgepipeError, FeatureMissing, NodeUnreachable
from edgepipe.plain_words import plain
from edgepipe.safe_text import one_line, visible

app = typer.Typer(help="Run the node at boot, also while no user is logged in.")

System = Annotated[
    bool,
    typer.Option("--system", help="On Linux: a service of the machine (needs root), not of this user."),
]

_COMMAND_S = 60.0
_ANSWER_S = 60.0  # a slow machine starts Python, then imports a backend
_LOOK_S = 0.5
_SYSTEMD = Path("/run/systemd/system")  # exists where systemd has started the machine

Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


@app.callback()
def _group() -> None:
    """Run the node at boot, also while no user is logged in."""


@app.command()
def install(
    system: System = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the file and the commands; change nothing.")
    ] = False,
    data_dir: DataDir = None,
) -> None:
    """Start the node now and at every boot."""
    folder = data_dir_of(data_dir)
    plan = service_plan(folder, system=system)
    if dry_run:
        print(f"would write {plan.path}:\n\n{plan.text}\nwould run:")
        for command in plan.install:
            print(f"  {shlex.join(command)}")
        return
    from edgepipe.cli.restarting import running_node, stop_for_service  # it imports this module

    if (node := running_node(folder)) is not None and node.service is None:
        stop_for_service(node)
    install_service(plan)
    wait_until_answers(folder)
    print(f"the node runs now and at every boot ({plan.manager.value}): {plan.path}")


@app.command()
def status(system: System = False, data_dir: DataDir = None, as_json: Json = False) -> None:
    """Show whether the service is installed and runs. Exit code 3 if it does not run."""
    plan = service_plan(data_dir_of(data_dir), system=system)
    state = read_state(plan, run_command)
    if as_json:
        print_json(state)
    else:
        print(one_line(f"{state['state']}: {plan.path}" + (f" (process {state['pid']})" if state["pid"] else "")))
    if state["state"] != "active":
        raise typer.Exit(NodeUnreachable.exit_code)


@app.command()
def logs(
    lines: Annotated[int, typer.Option("--lines", "-n", metavar="N", min=1, help="Number of newest lines.")] = 50,
    system: System = False,
    data_dir: DataDir = None,
) -> None:
    """Show the service's output, also that of a failed start."""
    plan = service_plan(data_dir_of(data_dir), system=system)
    done = run_command((*plan.logs, str(lines)))
    print(visible(done.stdout.rstrip("\n"), keep="\n"))


@app.command()
def uninstall(system: System = False, data_dir: DataDir = None) -> None:
    """Stop the node and no longer start it at boot. Settings, keys and models stay."""
    plan = service_plan(data_dir_of(data_dir), system=system)
    if not plan.path.exists():
        print(f"no service is installed: {plan.path} does not exist")
        return
    uninstall_service(plan)
    print(f"removed {plan.path}; identity, settings and models stay")


def service_plan(data_dir: Path, *, system: bool) -> ServiceSetup:
    """Make the plan for this machine. Raises FeatureMissing without systemd and launchd."""
    if sys.platform == "darwin":
        manager = Manager.LAUNCHD
    elif sys.platform == "linux":
        manager = Manager.SYSTEMD_SYSTEM if system else Manager.SYSTEMD_USER
    else:
        raise FeatureMissing(f"{sys.platform} has no supported service manager", next_step="edgepipe node start")
    asked_by = asking_user()  # the node never needs to be root
    user = asked_by or getpass.getuser()
    home = Path(f"~{asked_by}").expanduser() if asked_by else Path.home()
    python = Path(sys.executable).absolute()
    return make_plan(manager, ServiceFacts(user=user, home=home, python=python, data_dir=data_dir))


def manager_runs() -> bool:
    """Return whether systemd or launchd runs this machine; containers and WSL may have neither."""
    return sys.platform == "darwin" or _SYSTEMD.is_dir()


def install_service(plan: ServiceSetup) -> None:
    """Write the file and start the service; may be repeated. Raises ConfigInvalid, FeatureMissing, and undoes all."""
    before = _read(plan.path)
    _write(plan, plan.text)
    try:
        for command in plan.install:
            run_command(command)
    except EdgepipeError:
        if before is None:
            plan.path.unlink(missing_ok=True)
        else:
            _write(plan, before)
        raise


def uninstall_service(plan: ServiceSetup) -> None:
    """Stop the service and remove its file. Raises ConfigInvalid, FeatureMissing."""
    for command in plan.uninstall:
        run_command(command)
    try:
        plan.path.unlink(missing_ok=True)
    except OSError as exc:
        raise _not_written(plan, exc) from exc
    for command in plan.forget:
        run_command(command)


def wait_until_answers(data_dir: Path) -> None:
    """Wait until a command reaches the node: a manager reports only that it started a process. Raises ClusterError."""
    command = [sys.executable, "-P", "-m", "edgepipe.cli", "status", "--json", "--data-dir", str(data_dir)]
    deadline_s = time.monotonic() + _ANSWER_S
    while (done := _ask(command)).returncode not in (0, DEGRADED_EXIT):
        if time.monotonic() > deadline_s:
            said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise ClusterError(
                "the service has started the node, which does not answer",
                fact=said[0].removeprefix("error: "),
                next_step="edgepipe service logs",
            )
        time.sleep(_LOOK_S)


def _ask(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command of the installed version: this process may have the modules of the one before."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=_ANSWER_S)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", "it accepts connections and sends nothing")


def read_state(plan: ServiceSetup, run: Run) -> dict[str, str]:
    """Return ``{"state": "active" | "inactive" | "failed" | "not installed" | ..., "pid": ..., "path": ...}``."""
    if not plan.path.exists():
        return {"state": "not installed", "pid": "", "path": str(plan.path)}
    try:
        text = run(plan.status).stdout
    except FeatureMissing:
        text = ""
    if plan.manager is Manager.LAUNCHD:
        facts = dict(line.strip().split(" = ", 1) for line in text.splitlines() if " = " in line)
        state = "active" if facts.get("state") == "running" else facts.get("state", "inactive")
        return {"state": state, "pid": facts.get("pid", ""), "path": str(plan.path)}
    facts = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    pid = facts.get("MainPID", "0")
    return {
        "state": facts.get("ActiveState", "inactive"),
        "pid": "" if pid == "0" else pid,
        "path": str(plan.path),
    }


def run_command(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run one of a plan's commands. Raises FeatureMissing with its output if the command fails or is missing."""
    step = "edgepipe node start    (runs it without a service)"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise FeatureMissing(f"'{shlex.join(command)}' cannot be run", fact=plain(exc), next_step=step) from exc
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise FeatureMissing(
            f"'{shlex.join(command)}' failed", fact=said[-1] if said else f"exit code {done.returncode}", next_step=step
        )
    return done


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None


def _write(plan: ServiceSetup, text: str) -> None:
    try:
        plan.path.parent.mkdir(parents=True, exist_ok=True)
        plan.path.write_text(text, encoding="utf-8")
        plan.path.chmod(0o644)
    except OSError as exc:
        raise _not_written(plan, exc) from exc


def _not_written(plan: ServiceSetup, exc: OSError) -> ConfigInvalid:
    step = "run it with sudo" if plan.needs_root else "check the folder's permissions"
    return ConfigInvalid(f"{plan.path} cannot be changed", fact=exc.strerror or "", next_step=step)
