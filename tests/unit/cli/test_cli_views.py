"""What people look at: the status picture, the footer, JSON."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from edgepipe.backend.types import PackedProducts, SlowPath
from edgepipe.cli.chat.conversation import Answer
from edgepipe.cli.doctor.findings import Level
from edgepipe.cli.doctor.node_findings import engine_findings, node_findings
from edgepipe.cli.output import as_dict, bar, print_error, wrapped
from edgepipe.cli.sse import EventContent, error_from_body, piece_from_event
from edgepipe.cli.views.status_view import layout_text, render_status
from edgepipe.errors import EdgepipeError, ModelUnknown, PipelineBroken, PromptTooLong, RemoteProtocolError, StageLost
from edgepipe.gateway.problems import from_error
from edgepipe.ids import NodeId
from edgepipe.wire.engines import Advice, PromptSteps, Quarantined
from edgepipe.wire.nodes import ClusterStatus, MemberState, NodeState
from tests.support.processes.command_line import make_engine, make_status, with_engine


def picture(status: ClusterStatus, *, width: int = 80) -> list[str]:
    """The status as lines of plain text."""
    console = Console(file=io.StringIO(), width=width, highlight=False, emoji=False)
    for part in render_status(status):
        console.print(part)
    file: Any = console.file
    return file.getvalue().splitlines()


def test_the_status_fits_80_columns_and_cuts_nothing() -> None:
    lines = picture(make_status())
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for word in (
        "gamer (this)",
        "0.41 ms",
        "20.6 of 21.6 GB",
        "0-38",
        "39-79",
        "99%",
        "degraded",
        "12.4 GB of 19.3 GB",
        "Micro-batches: 2, since stage 1 takes 62.0 ms a step and never waits",
        "Each token takes 90.1 ms, 4.0 ms of it on the network.",
        "Slowest: stage 1 (studio) · 32 tok/s expected",
        "Drafts: 72% of 1,500 right · chats with drafts are 1.83 times as fast",
        "Prefix cache: 25% of 1,000 tokens",
        "Preempted twice",
        "Recovered 3 times; answers paused for 1.5 s in total",
        "Moved twice, as asked for; answers paused for 400 ms in total",
    ):
        assert word in text
    assert "…" not in text


def test_the_status_says_what_lies_on_disk_or_why_nothing_does() -> None:
    used = with_engine(make_status(), block_size=16, disk_blocks=1000, used_disk_blocks=10, fetched_tokens=320)
    text = "\n".join(picture(used))
    assert "KV on disk: 160 of 16,000 tokens; 320 came back" in text
    rests = with_engine(used, disk_problem="gamer: the disk is full", disk_again_unix_s=1)
    off = " ".join("\n".join(picture(rests)).split())
    assert (
        "KV on disk: off for now; gamer: the disk is full. The next conversation that leaves RAM tries it again" in off
    )
    assert "came back" not in off
    later = with_engine(rests, disk_again_unix_s=1 << 40)
    assert "Tried again at " in " ".join("\n".join(picture(later)).split())


def test_the_status_says_why_less_ram_is_used() -> None:
    used = with_engine(make_status(), block_size=16, host_blocks=1000, used_host_blocks=10, host_bound_blocks=400)
    assert "KV in RAM: 160 of 16,000 tokens; 0 came back" in " ".join("\n".join(picture(used)).split())
    short = with_engine(used, host_problem="gamer has 0.9 GB left for all programs")
    text = " ".join("\n".join(picture(short)).split())
    assert "KV in RAM: 160 of 6,400 tokens; 0 came back" in text
    assert "room for 16,000 tokens when other programs end: gamer has 0.9 GB left for all programs" in text


@pytest.mark.parametrize(
    ("state", "shown"),
    [("suspect", "does not answer"), ("dead", "gone"), ("left", "has left"), ("asleep", "asleep")],
)
def test_a_node_that_is_away_is_told_without_colour(state: str, shown: str) -> None:
    gamer, studio, laptop = make_status().members
    lines = picture(replace(make_status(), members=(gamer, replace(studio, state=state), laptop)))
    (line,) = [line for line in lines if line.startswith("● studio")]
    assert shown in line
    assert "GB" not in line, "memory that may be gone"


@pytest.mark.parametrize("width", [40, 60])
def test_a_narrow_status_breaks_no_word_and_no_bar(width: int) -> None:
    wide, narrow = (picture(make_status(), width=columns) for columns in (200, width))
    assert max(map(len, narrow)) <= width
    assert words_of(narrow) >= words_of(wide)
    stages = next(index for index, line in enumerate(narrow) if "WEIGHTS" in line)
    assert [line.split()[0] for line in narrow[stages : stages + 3]] == ["STAGE", "gamer", "studio"]


def words_of(lines: Sequence[str]) -> set[str]:
    """Words, and bars as one word; the ring's second line is as long as the ring."""
    return {word for line in lines if "token ─" not in line for word in re.findall(r"▕[^▏]*▏|\S+", line)}


def test_the_time_since_the_start_has_a_unit_that_fits() -> None:
    assert picture(replace(make_status(), uptime_ms=200))[0].endswith("up 1.0 s")
    assert picture(replace(make_status(), uptime_ms=200 * 3_600_000))[0].endswith("up 8 d 8 h")


def test_a_drained_node_is_shown_as_one() -> None:
    status = make_status()
    gamer, studio, laptop = status.members

    def drained(reserved_bytes: int) -> list[str]:
        device = replace(studio.node.devices[0], reserved_bytes=reserved_bytes)
        leaving = replace(studio, node=replace(studio.node, draining=True, devices=(device,)))
        return picture(replace(status, members=(gamer, leaving, laptop)))

    lines = drained(0)
    assert "2 of 3 nodes, 1 drained" in lines[0]
    assert [line for line in lines if "drained, takes no work" in line and "studio" in line]
    assert any("being drained" in line for line in drained(1))
    stops = replace(studio, node=replace(studio.node, draining=True, leaving=True))
    lines = picture(replace(status, members=(gamer, stops, laptop)))
    assert "2 of 3 nodes, studio is leaving" in lines[0]


def test_a_faster_layout_is_told_in_a_sentence() -> None:
    advice = Advice(plan="studio:0-79", gain=0.23, pause_s=1.4, why="studio can be used now")
    text = "\n".join(picture(with_engine(make_status(), advice=advice)))
    assert "A faster layout exists (+23 %): all layers on studio." in text
    assert "studio can be used now. Switching pauses answers for 1.4 s:" in text
    assert layout_text("a:0-14,b:15-29") == "layers 0-14 on a, 15-29 on b"


def test_a_record_that_could_not_be_written_is_in_the_status_and_in_doctor() -> None:
    record = "the record of what is served: No space left on device"
    status = replace(make_status(), unwritten=(record,))
    text = " ".join(" ".join(picture(status)).split())
    assert f"this node cannot write {record}; it tries again" in text
    assert "degraded" in text
    (finding,) = [finding for finding in node_findings(status) if finding.id == "node.disk"]
    assert finding.fact == record
    assert "make room" in finding.remedy


def test_a_slow_link_is_named_by_its_ends() -> None:
    status = with_engine(make_status(), bottleneck="link 0-1")
    assert "Slowest: link 0-1 (gamer to studio)" in "\n".join(picture(status))


def test_the_status_says_how_prompts_are_computed_and_what_bounds_them() -> None:
    steps = PromptSteps(in_flight=4, num_tokens=1024, ms=48.2, bound="link 0-1")
    text = "\n".join(picture(with_engine(make_status(), prompt_steps=steps), width=120))
    assert "Prompts: 4 x 1,024 tokens in flight, 48 ms each · bound: link 0-1 (gamer to studio)" in text
    assert "longer than the goal" not in text
    missed = PromptSteps(in_flight=1, num_tokens=32, ms=210.0, bound="goal", over_goal_ms=320.4)
    text = "\n".join(picture(with_engine(make_status(), prompt_steps=missed), width=120))
    assert "bound: the goal for chats (--itl-goal)" in text
    assert "Each token of a chat waits 320 ms longer than the goal while a prompt is computed" in text


def test_what_moved_while_nothing_was_answered_kept_nobody_waiting() -> None:
    status = with_engine(make_status(), recoveries=1, stall_ms=0)
    assert "Recovered once; no answer had to wait" in "\n".join(picture(status))


def test_a_broken_device_is_told_in_the_status_and_by_doctor_with_the_remedy() -> None:
    broken = Quarantined(node_id=NodeId("n2"), node_name="studio", seconds=28.4, reason="a step could not be computed")
    error = PipelineBroken("'m' cannot be computed at present", fact="3 attempts in a row ended without a token")
    status = with_engine(make_status(), state="waiting", message="trying again in 8 s", left_out=(broken,), error=error)
    text = "\n".join(picture(status, width=120))
    assert "waiting · trying again in 8 s" in text
    assert "3 attempts in a row ended without a token" in text
    reason = "studio is left out for 28 s more: a step could not be computed"
    assert reason in text
    left_out, waiting = engine_findings(NodeState(node_id=NodeId("n1"), engines=status.engines))
    assert left_out.what.endswith(reason)
    assert "edgepipe logs' on studio" in left_out.remedy
    assert "cannot be computed at present" in waiting.what


def test_what_multiplies_with_packed_weights_is_told_with_the_reason_and_the_remedy() -> None:
    fast, slow = PackedProducts(by="own kernels (AVX2)"), PackedProducts(by="torch", reason="it is missing")
    mends = replace(slow, remedy="pip install it")
    first, second = make_status().engines[0].stages
    stages = (replace(first, products=(fast,)), replace(second, products=(fast, mends)))
    status = with_engine(make_status(), stages=stages)
    lines = picture(status)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "Packed weights: own kernels (AVX2) on gamer, studio" in text
    assert "Packed weights: torch on studio\n    it is missing\n    pip install it" in text
    findings = list(engine_findings(NodeState(node_id=NodeId("n1"), engines=status.engines)))
    assert [finding.level for finding in findings] == [Level.OK, Level.OK, Level.WARNING]
    assert (findings[-1].fact, findings[-1].remedy) == ("it is missing", "on studio: pip install it")
    engine = make_engine("m", stages=(replace(first, products=(slow,)),))
    (finding,) = engine_findings(NodeState(node_id=NodeId("n1"), engines=(engine,)))
    assert (finding.level, finding.remedy) == (Level.NOTE, "")


def test_what_is_slow_is_told_with_its_cost_and_the_remedy() -> None:
    slow = SlowPath(what="steps run without graphs", cost="64 instead of 687 tok/s", reason="a card of 2018")
    first, second = make_status().engines[0].stages
    stages = (replace(first, slow_paths=(slow,)), replace(second, slow_paths=(slow, replace(slow, remedy="buy one"))))
    status = with_engine(make_status(), stages=stages)
    lines = picture(status)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    told = "steps run without graphs\n    a card of 2018\n    64 instead of 687 tok/s"
    assert f"Slow on gamer, studio: {told}" in text
    assert f"Slow on studio: {told}\n    buy one" in text
    *_, before, last = engine_findings(NodeState(node_id=NodeId("n1"), engines=status.engines))
    assert {before.level, last.level} == {Level.WARNING}
    assert last.what.endswith("on studio: steps run without graphs")
    assert last.fact == "a card of 2018; 64 instead of 687 tok/s"
    assert (before.remedy, last.remedy) == ("", "on studio: buy one")


def test_the_ring_is_drawn_for_any_number_of_stages() -> None:
    status = make_status()
    lines = picture(status)
    top = next(line for line in lines if "╭▶" in line)
    below = lines[lines.index(top) + 1]
    assert len(top) == len(below)
    assert below.strip().startswith("╰")
    stages = status.engines[0].stages
    many = picture(with_engine(status, stages=stages + 6 * stages[:1]))
    assert max(map(len, many)) <= 80
    assert "token" in "\n".join(many)


def test_a_cluster_of_one_that_serves_nothing_says_what_to_do() -> None:
    alone = MemberState(state="alive", self=True, node=NodeState(node_id=NodeId("n1"), name="a"))
    text = "\n".join(picture(ClusterStatus(cluster_name="home", node_id=NodeId("n1"), members=(alone,))))
    assert "1 node" in text
    assert "edgepipe serve" in text


@pytest.mark.parametrize(
    ("left_s", "shown"), [(0.0, "now"), (42.3, "in 42 s"), (-9.0, "now"), (270.2, "in 4 min 30 s")]
)
def test_a_crashed_engine_shows_when_it_starts_again_and_why_it_ended(
    monkeypatch: pytest.MonkeyPatch, left_s: float, shown: str
) -> None:
    monkeypatch.setattr("edgepipe.cli.views.status_view.time", SimpleNamespace(time=lambda: 1_700_000_000.0))
    error = StageLost("the engine of 'm' ended again and again", fact="the last time: killed by SIGKILL")
    at_us = int((1_700_000_000.0 + left_s) * 1e6)
    paused = with_engine(make_status(), state="waiting", message="x", error=error, starts_at_us=at_us)
    lines = picture(paused, width=120)
    assert any(line.endswith(f"waiting · starts again {shown}") for line in lines)
    assert "killed by SIGKILL" in "\n".join(lines)
    assert as_dict(paused)["engines"][0]["starts_at_us"] == at_us


def test_a_failed_model_shows_its_three_lines() -> None:
    error = EdgepipeError("stage 1 ended", fact="exit status -9")
    text = "\n".join(picture(with_engine(make_status(), state="failed", error=error)))
    assert "stage 1 ended" in text
    assert "exit status -9" in text


def test_status_as_json_has_numbers_as_numbers() -> None:
    value = json.loads(json.dumps(as_dict(make_status())))
    assert value["members"][0]["node"]["devices"][0]["reserved_bytes"] == 20_600_000_000
    assert value["members"][1]["rtt_ms"] == 0.41
    assert value["engines"][0]["stages"][1]["slices"][0]["layers"] == {"start": 39, "end": 80}
    assert value["engines"][0]["error"] is None


def test_json_has_errors_in_full_and_keeps_its_types_where_something_is_missing() -> None:
    error = PipelineBroken("what", fact="fact", next_step="next", node="studio")
    left_out = Quarantined(node_id=NodeId("n2"), seconds=2.5, reason="it failed")
    status = with_engine(make_status(), error=error, left_out=(left_out,), certificate=b"PEM")
    engine = json.loads(json.dumps(as_dict(status)))["engines"][0]
    assert engine["error"] == {
        "code": "pipeline_broken",
        "what": "what",
        "fact": "fact",
        "next_step": "next",
        "node": "studio",
        "stage": "",
        "request_id": "",
    }
    assert (engine["left_out"][0]["other_id"], engine["advice"], engine["certificate"]) == ("", None, "PEM")


def test_a_bar_is_as_full_as_its_fraction() -> None:
    assert bar(0, width=4) == "▕    ▏"
    assert bar(0.5, width=4) == "▕██  ▏"
    assert bar(7, width=4) == "▕████▏"


def test_the_footer_has_the_four_figures() -> None:
    answer = Answer(
        text="x",
        finish_reason="stop",
        num_tokens=412,
        num_prompt_tokens=9,
        first_word_s=1.2,
        tokens_per_s=11.43,
        num_nodes=2,
    )
    assert answer.footer() == "412 tok · 11.4 tok/s · first word 1.2 s · 2 nodes"


@pytest.mark.parametrize(
    ("data", "piece"),
    [
        ('{"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": null}]}', EventContent()),
        ('{"choices": [{"delta": {"content": "a"}, "finish_reason": null}], "usage": null}', EventContent(text="a")),
        ('{"choices": [{"delta": {"reasoning_content": "b"}, "finish_reason": null}]}', EventContent(reasoning="b")),
        ('{"choices": [{"delta": {}, "finish_reason": "stop"}]}', EventContent(finish_reason="stop")),
        (
            '{"choices": [], "usage": {"completion_tokens": 3, "prompt_tokens": 2}}',
            EventContent(completion_tokens=3, prompt_tokens=2),
        ),
    ],
)
def test_events_become_pieces(data: str, piece: EventContent) -> None:
    assert piece_from_event(data) == piece


@pytest.mark.parametrize("data", ["", "[]", "3", '{"choices": 1}', '{"choices": [3]}', "{"])
def test_what_is_no_chat_stream_is_a_protocol_error(data: str) -> None:
    with pytest.raises(RemoteProtocolError):
        piece_from_event(data)


@pytest.mark.parametrize("kind", [ModelUnknown, PromptTooLong])
def test_an_error_keeps_its_class_and_its_three_lines_through_http(
    kind: type[EdgepipeError], capsys: pytest.CaptureFixture[str]
) -> None:
    body = json.dumps(from_error(kind("what", fact="fact", next_step="next")).body()).encode()
    error = error_from_body(body, status=400)
    assert type(error) is kind
    print_error(error)
    assert capsys.readouterr().err == "error: what\n       fact\n   try: next\n"
    with pytest.raises(kind):
        piece_from_event(body.decode())


def test_lines_end_between_words_where_the_terminal_does() -> None:
    text = "one two-three\n/a/path/longer/than/a/line four"
    assert wrapped(text, first="-> ", width=15).split("\n") == [
        "-> one",
        "   two-three",
        "   /a/path/longer/than/a/line",
        "   four",
    ]
    assert wrapped(text, first="-> ", width=99).split("\n") == [
        "-> one two-three",
        "   /a/path/longer/than/a/line four",
    ]


def test_an_error_page_that_is_not_ours_is_a_protocol_error() -> None:
    assert isinstance(error_from_body(b"<html>", status=502), RemoteProtocolError)


def test_the_status_says_how_many_snapshots_found_no_slot() -> None:
    status = make_status()
    text = "\n".join(picture(with_engine(status, state_slots=6, free_slots=0, missed_snapshots=3), width=120))
    assert "states 6 of 6" in text
    assert "Did not keep 3 snapshots of states: running chats held all 6 slots" in text
