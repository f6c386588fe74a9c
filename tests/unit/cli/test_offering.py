"""``chat`` in a cluster without a model offers models that fit, and fetches the chosen one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from edgepipe.cli import offering
from edgepipe.cli.wizard import type_choice
from edgepipe.cli.wizard.asking import AskedChoice, Defaults, Quit
from edgepipe.errors import ModelUnknown
from edgepipe.ids import NodeId
from edgepipe.store.pull import PullResult
from edgepipe.wire.nodes import ClusterStatus, DeviceState, MemberState, ModelOnDisk, NodeState
from tests.support.daemon.admin_server import FakeNode, answering
from tests.support.processes.command_line import Run, make_status, with_devices


def roomy(device: DeviceState) -> DeviceState:
    """A fast device with free memory."""
    assert device.profile is not None
    fast = replace(device.profile, bandwidth_bytes_per_s=1e12, flops=1e14)
    return replace(device, profile=fast, free_bytes=20_000_000_000)


EMPTY = replace(with_devices(make_status(), roomy), engines=())
"""A cluster with room and no model."""


def of_one(*models: ModelOnDisk) -> ClusterStatus:
    """A cluster of one node with these models on its disk."""
    node = NodeState(node_id=NodeId("a"), models=models)
    return ClusterStatus(node_id=node.node_id, members=(MemberState(node=node),))


class Answering(Defaults):
    """Chooses always the same, or stops."""

    def __init__(self, answer: str) -> None:
        self._answer = answer

    def choose(self, question: str, choices: Sequence[AskedChoice], *, default: str) -> str:
        """The answer."""
        if self._answer == "^C":
            raise Quit
        assert self._answer in [choice.value for choice in choices]
        return self._answer


class Pulling:
    """Pulls nothing, and notes what."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, root: Path, model: str) -> PullResult:
        self.names.append(model)
        return PullResult(model_id="tiny", path=root / "tiny", files=())


def test_the_model_that_is_chosen_is_fetched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pull = Pulling()
    with answering(tmp_path, FakeNode(status=EMPTY)):
        assert offering.fetch_chosen(Answering("demo"), tmp_path, tmp_path / "models", pull=pull) == "tiny"
    assert pull.names == ["demo"]
    shown = capsys.readouterr().out
    assert "No machine of this cluster has a model yet." in shown
    assert "usable memory of this cluster: 40.0 GB" in shown, "a machine that is not alive has none"


def test_none_is_fetched_where_none_is_wanted(tmp_path: Path) -> None:
    pull = Pulling()
    assert offering.fetch_chosen(Answering("skip"), tmp_path, tmp_path / "models", pull=pull) == ""
    with pytest.raises(typer.Exit) as stopped:
        offering.fetch_chosen(Answering("^C"), tmp_path, tmp_path / "models", pull=pull)
    assert stopped.value.exit_code == 130
    assert pull.names == []


@pytest.mark.parametrize(
    ("terminal", "status", "offered"),
    [
        (True, EMPTY, "tiny"),
        (False, EMPTY, ""),
        (True, None, ""),
        (True, make_status(), ""),
        (True, of_one(ModelOnDisk(model="a", complete=True)), ""),
    ],
    ids=["none there", "no terminal", "no node", "one served", "one on a disk"],
)
def test_only_a_person_whose_cluster_has_no_model_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, terminal: bool, status: ClusterStatus | None, offered: str
) -> None:
    class Stream:
        def isatty(self) -> bool:
            return terminal

        def write(self, text: str) -> int:
            return len(text)

        def flush(self) -> None:
            pass

    for name in ("stdin", "stdout"):
        monkeypatch.setattr(sys, name, Stream())
    with nullcontext() if status is None else answering(tmp_path, FakeNode(status=status)):
        found = offering.offer_model(tmp_path, tmp_path / "models", asking=Answering("demo"), pull=Pulling())
    assert found == offered


@pytest.mark.parametrize("there", ["Qwen/Qwen3-8B-GGUF:q4_k_m", ""])
def test_a_named_model_is_fetched_only_where_no_machine_has_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, there: str
) -> None:
    pull = Pulling()
    for name in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{name}.isatty", lambda: True)
    monkeypatch.setattr(type_choice, "ask_to_fetch", lambda asking, model, data_dir: model)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    status = of_one(ModelOnDisk(model=there, complete=True)) if there else EMPTY
    with answering(tmp_path, FakeNode(status=status)):
        found = offering.offer_named("qwen3:8b", tmp_path, tmp_path / "m", asking=Answering("demo"), pull=pull)
    assert (found, pull.names) == (("qwen3:8b", []) if there else ("tiny", ["qwen3:8b"]))


def test_chat_ends_where_a_person_does_not_want_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(type_choice, "ask_to_fetch", lambda asking, model, data_dir: "")  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    pull = Pulling()
    with pytest.raises(typer.Exit) as stopped:
        offering.fetch_named(Answering("demo"), "qwen3:8b", tmp_path, tmp_path / "m", pull=pull)
    assert (stopped.value.exit_code, pull.names) == (0, [])


@pytest.mark.parametrize(
    ("typed", "there", "fetched"),
    [
        ("qwen3:8b", (), ["qwen3:8b"]),
        ("qwen3:8b", ("Qwen/Qwen3-8B-GGUF:q4_k_m", "Qwen/Qwen3-8B-GGUF:q8_0"), []),
        ("nobody's", (), []),
    ],
    ids=["on no disk", "two there", "no name of a model"],
)
def test_serve_fetches_a_known_model_that_is_on_no_disk(
    tmp_path: Path, typed: str, there: tuple[str, ...], fetched: list[str]
) -> None:
    pull, refused = Pulling(), ModelUnknown("not here")
    status = of_one(*(ModelOnDisk(model=name, complete=True) for name in there)) if there else EMPTY
    with (
        answering(tmp_path, FakeNode(status=status)),
        nullcontext() if fetched else pytest.raises(ModelUnknown, match=r"^not here$"),
    ):
        folders = (tmp_path, tmp_path / "m")
        assert offering.fetch_unserved(typed, *folders, refused, yes=True, as_json=False, pull=pull) == "tiny"
    assert pull.names == fetched


def test_serve_without_a_terminal_says_what_fetches_the_model(run: Run, tmp_path: Path) -> None:
    with answering(tmp_path / "data", FakeNode(status=EMPTY)):
        ran = run("serve", "qwen3:8b")
    assert ran.code == ModelUnknown.exit_code
    assert "try: edgepipe serve qwen3:8b --yes    (fetches it first)" in ran.err


def test_serve_serves_what_it_has_fetched(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(offering, "fetch_unserved", lambda *_, **__: "tiny")  # pyright: ignore[reportUnknownLambdaType]
    with answering(tmp_path / "data", FakeNode(status=EMPTY)) as node:
        run("serve", "qwen3:8b", "--name", "home", "--yes")
    assert (node.asked_to_serve, node.names) == (["qwen3:8b", "tiny"], [["home"], ["home"]])
