"""``chat`` in a cluster without a model offers models that fit, and fetches the chosen one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from edgepipe.cli import offering
from edgepipe.cli.wizard import model_choice
from edgepipe.cli.wizard.asking import Choice, Defaults, Quit
from edgepipe.ids import NodeId
from edgepipe.wire.nodes import ClusterStatus, DeviceState, MemberState, ModelOnDisk, NodeState
from tests.support.command_line import make_status, with_devices


def of_one(*models: ModelOnDisk) -> ClusterStatus:
    """A cluster of one node with these models on its disk."""
    node = NodeState(node_id=NodeId("a"), models=models)
    return ClusterStatus(node_id=node.node_id, members=(MemberState(node=node),))


class Answering(Defaults):
    """Chooses always the same, or stops."""

    def __init__(self, answer: str) -> None:
        self._answer = answer

    def choose(self, question: str, choices: Sequence[Choice], *, default: str) -> str:
        """The answer."""
        if self._answer == "^C":
            raise Quit
        assert self._answer in [one.value for one in choices]
        return self._answer


@pytest.fixture
def pulled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is pulled, in a cluster with room."""

    class Pulled:
        model_id = "tiny"

    names: list[str] = []

    def pull(root: Path, model: str) -> type[Pulled]:
        names.append(model)
        return Pulled

    def status(data_dir: Path) -> ClusterStatus:
        return with_devices(make_status(), roomy)

    def roomy(device: DeviceState) -> DeviceState:
        assert device.profile is not None
        fast = replace(device.profile, bandwidth_bytes_per_s=1e12, flops=1e14)
        return replace(device, profile=fast, free_bytes=20_000_000_000)

    monkeypatch.setattr(model_choice, "status_with_devices", status)
    monkeypatch.setattr(offering, "pull_model", pull)
    return names


def test_the_model_that_is_chosen_is_fetched(
    tmp_path: Path, pulled: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert offering.fetch_chosen(Answering("demo"), tmp_path, tmp_path / "models") == "tiny"
    assert pulled == ["demo"]
    shown = capsys.readouterr().out
    assert "No machine of this cluster has a model yet." in shown
    assert "usable memory of this cluster: 40.0 GB" in shown, "a machine that is not alive has none"


def test_none_is_fetched_where_none_is_wanted(tmp_path: Path, pulled: list[str]) -> None:
    assert offering.fetch_chosen(Answering("skip"), tmp_path, tmp_path / "models") == ""
    with pytest.raises(typer.Exit) as stopped:
        offering.fetch_chosen(Answering("^C"), tmp_path, tmp_path / "models")
    assert stopped.value.exit_code == 130
    assert pulled == []


@pytest.mark.parametrize(
    ("terminal", "status", "offered"),
    [
        (True, of_one(), "tiny"),
        (False, of_one(), ""),
        (True, None, ""),
        (True, make_status(), ""),
        (True, of_one(ModelOnDisk(model="a", complete=True)), ""),
    ],
    ids=["none there", "no terminal", "no node", "one served", "one on a disk"],
)
def test_only_a_person_whose_cluster_has_no_model_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, terminal: bool, status: ClusterStatus | None, offered: str
) -> None:
    async def found(data_dir: Path) -> ClusterStatus | None:
        return status

    class Stream:
        def isatty(self) -> bool:
            return terminal

    monkeypatch.setattr(offering, "status_if_running", found)
    monkeypatch.setattr(offering, "fetch_chosen", lambda asking, data_dir, models_dir: "tiny")  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    for name in ("stdin", "stdout"):
        monkeypatch.setattr(sys, name, Stream())
    assert offering.offer_model(tmp_path, tmp_path / "models") == offered
