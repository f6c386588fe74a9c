"""``--replicas`` on the command line, and several pipelines of a model in tables."""

from __future__ import annotations

import json

import pytest

from edgepipe.cli.find import served_engine
from edgepipe.cli.options import checked_replicas
from edgepipe.cli.output import make_console
from edgepipe.cli.ps import _row
from edgepipe.cli.views.status_view import render_status
from edgepipe.errors import ConfigInvalid
from edgepipe.ids import EngineId, Epoch, NodeId, PipelineId
from edgepipe.wire.engines import EngineState
from edgepipe.wire.nodes import ClusterStatus
from tests.support.processes.command_line import Run

IMAGINED = ("plan", "qwen2.5-14b:q4_k_m", "--emulate", "3x rtx4090", "--link", "1gbit,0.3ms", "--concurrency", "48")


def engines() -> tuple[EngineState, ...]:
    return tuple(
        EngineState(
            model="tiny",
            pipeline_id=PipelineId(f"p{number}"),
            epoch=Epoch(1, EngineId("e")),
            state="ready",
            num_replicas=2,
            replica=number,
        )
        for number in (1, 2)
    )


def test_plan_shows_every_pipeline_and_what_other_numbers_would_give(run: Run) -> None:
    shown = run(*IMAGINED, "--replicas", "auto")
    assert shown.code == 0
    assert max(map(len, shown.out.splitlines())) <= 80
    assert "3 replicas · 48 chats" in shown.out
    for part in ("1/3", "3/3", "PIPELINES", "3 *", "a · b · c"):
        assert part in shown.out
    layouts = json.loads(run(*IMAGINED, "--replicas", "auto", "--json").out)["layouts"]
    assert layouts[0]["replicas"] == 3
    assert {layout["replicas"] for layout in layouts} == {1, 2, 3}
    two = json.loads(run(*IMAGINED, "--replicas", "2", "--json").out)["layouts"]
    assert [len(layout["pipelines"]) for layout in two] == [2]


def test_what_cannot_be_placed_is_refused(run: Run) -> None:
    refused = run(*IMAGINED, "--replicas", "4")
    assert refused.code != 0
    assert "4 replicas do not fit on 3 machines" in refused.err
    assert "give --replicas 3" in refused.err
    assert run(*IMAGINED, "--replicas", "2", "--what-if", "add rtx4090").code == 2
    assert run("serve", "tiny", "--replicas", "2", "--plan", "a:0-5").code == 2
    assert run("serve", "tiny", "--replicas", "2", "--rebalance").code == 2


@pytest.mark.parametrize(
    ("text", "parsed"), [("", (0, False)), ("1", (1, False)), ("3", (3, False)), ("auto", (0, True))]
)
def test_numbers_and_auto_are_read(text: str, parsed: tuple[int, bool]) -> None:
    assert checked_replicas(text) == parsed


@pytest.mark.parametrize("text", ["0", "-1", "two", "17", "1.5"])
def test_other_values_are_refused(text: str) -> None:
    with pytest.raises(ConfigInvalid, match="--replicas cannot be"):
        checked_replicas(text)


def test_tables_name_the_replicas_and_commands_take_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert [_row(engine)[0] for engine in engines()] == ["tiny replica 1/2", "tiny replica 2/2"]
    status = ClusterStatus(cluster_id="c", cluster_name="home", engines=engines(), node_id=NodeId("n"))
    for part in render_status(status):
        make_console().print(part)
    shown = capsys.readouterr().out
    assert "tiny replica 1/2 · ready" in shown
    assert "tiny replica 2/2 · ready" in shown
    chosen = served_engine(status, "", verb="chat")
    assert chosen is not None
    assert chosen.model == "tiny"
