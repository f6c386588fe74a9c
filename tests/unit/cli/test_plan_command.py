"""``edgepipe plan``: the picture, its twin in JSON, and how it ends when nothing can be planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgepipe.cli.output import make_console
from edgepipe.cli.plan import make_demand
from edgepipe.cli.views.plan_view import render_preview
from edgepipe.errors import NodeUnreachable
from edgepipe.planner.cluster import known_cluster
from edgepipe.planner.constraints import Constraints
from edgepipe.planner.preview import preview
from edgepipe.spec.config import hf_config
from edgepipe.units import parse_link
from tests.support.daemon.admin_server import FakeNode, answering
from tests.support.models.family_files import tiny_values
from tests.support.processes.command_line import Run

IMAGINED = ("plan", "qwen2.5-32b:bf16", "--emulate", "4x rtx4090", "--link", "1gbit,0.3ms")


def test_the_picture_fits_eighty_columns_and_names_what_matters(run: Run) -> None:
    shown = run(*IMAGINED, "--objective", "throughput", "--what-if", "link 100mbit,5ms")
    assert shown.code == 0
    assert max(map(len, shown.out.splitlines())) <= 80
    for part in ("MACHINE", "bottleneck", "one token", "tok/s", "estimated from their rates", "with the changes"):
        assert part in shown.out
    assert "\x1b" not in shown.out, "colours in a pipe"


def test_json_is_one_document_and_says_the_same(run: Run) -> None:
    printed = json.loads(run(*IMAGINED, "--json").out)
    by_hand = json.loads(run(*IMAGINED, "--json", "--plan", printed["plan"]).out)
    assert by_hand["plan"] == printed["plan"]
    assert by_hand["one_chat_tokens_per_s"] == printed["one_chat_tokens_per_s"]
    assert by_hand["left_out"] == []


def test_the_model_s_own_layer_for_drafts_is_counted(run: Run) -> None:
    imagined = ("plan", "qwen3.6-27b:q4_k_m", "--emulate", "2x rtx4090", "--nodes", "2", "--json")
    plain, drafting = (json.loads(run(*imagined, "--draft", kind).out) for kind in ("off", "mtp"))
    assert plain == json.loads(run(*imagined).out), "nothing changes for those who do not ask for it"
    assert plain["stages"][-1]["layers"].endswith("-63")
    assert drafting["stages"][-1]["layers"].endswith("-64")
    first, second = (sum(stage["weight_bytes"] for stage in each["stages"]) for each in (plain, drafting))
    assert 0.7e9 < second - first < 1.6e9, "a layer and the embedding"
    assert drafting["kv_tokens"] < plain["kv_tokens"]
    again = json.loads(run(*imagined[:4], "--json", "--draft", "mtp", "--plan", plain["plan"]).out)
    assert again["stages"][-1]["layers"].endswith("-64")
    drafts = drafting["drafts"]
    assert (plain["drafts"], drafts["source"], drafts["right"]) == (None, "mtp", [0.8, 0.7, 0.6])
    assert drafts["num_bytes"] == second - first
    assert drafts["tokens_per_s"] == pytest.approx(drafting["one_chat_tokens_per_s"] * drafts["factor"], rel=1e-3)
    picture = run(*imagined[:-1], "--draft", "mtp").out
    assert f"{drafts['factor']:.2f}x: {drafts['count']} a turn" in picture
    assert "if 80%, 70%" in picture
    assert max(map(len, picture.splitlines())) <= 80


def test_a_draft_model_is_counted_beside_the_head(run: Run) -> None:
    imagined = ("plan", "llama-3.3-70b:q4_k_m", "--emulate", "3x rtx4090", "--nodes", "3", "--json")
    plain, drafting = (json.loads(run(*imagined, "--draft", draft).out) for draft in ("off", "llama-3.2-3b:q4_k_m"))
    first, second = (sum(stage["weight_bytes"] for stage in each["stages"]) for each in (plain, drafting))
    assert 3.7e9 < second - first < 4.9e9, "its weights and its KV"
    assert drafting["kv_tokens"] < plain["kv_tokens"]
    drafts = drafting["drafts"]
    assert (plain["drafts"], drafts["source"]) == (None, "model")
    assert drafts["tokens_per_s"] == pytest.approx(drafting["one_chat_tokens_per_s"] * drafts["factor"], rel=1e-3)
    assert drafts["num_bytes"] == pytest.approx(second - first, rel=1e-3)
    picture = run(*imagined[:-1], "--draft", "llama-3.2-3b:q4_k_m").out
    assert f"{drafts['factor']:.2f}x: {drafts['in_flight']} windows of {drafts['count']}, " in picture
    assert max(map(len, picture.splitlines())) <= 80
    refused = run(*imagined, "--draft", "qwen3.6-27b")
    assert refused.code == 2
    assert "qwen3.6-27b cannot be a draft model" in refused.err


def test_a_model_without_such_a_layer_is_refused(run: Run) -> None:
    refused = run("plan", "llama-3.1-8b", "--emulate", "rtx4090", "--draft", "mtp")
    assert refused.code == 2
    assert "cannot draft with a layer of its own" in refused.err
    assert run("plan", "llama-3.1-8b", "--emulate", "rtx4090", "--draft", "eagle").code == 2


def test_too_little_room_for_one_chat_is_said_with_what_helps(run: Run) -> None:
    shown = run("plan", "llama-3.3-70b:q4_k_m", "--emulate", "2x rtx4090 24GB").out
    assert "less than one chat of 4,096" in shown
    assert "tokens at most; --kv 8bit makes room for twice that" in shown


@pytest.mark.parametrize(("context", "factors"), [(64, "short"), (65, "long"), (0, "long")])
def test_a_longrope_model_says_which_rotary_factors_it_uses(
    context: int, factors: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = known_cluster(("rtx4090",), hf_config(tiny_values("phi3")), link=parse_link("1gbit,0.3ms"), model="phi")
    demand = make_demand(cluster, objective="", context=context, concurrency=0)
    for part in render_preview(preview(demand, cluster, Constraints())):
        make_console().print(part)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{factors} rotary factors: the context of {context or 256} tokens" in shown


def test_one_card_holds_a_context_of_262144_tokens(run: Run) -> None:
    flags = ("--emulate", "rtx4090", "--kv", "4bit", "--context", "262144", "--json")
    planned = json.loads(run("plan", "qwen3.6-35b-a3b:q4_k_m", *flags).out)
    assert planned["kv_tokens"] >= 262_144
    (stage,) = planned["stages"]
    assert stage["weight_bytes"] + stage["kv_bytes"] <= stage["free_bytes"]


def test_wishes_are_kept(run: Run) -> None:
    planned = json.loads(run(*IMAGINED, "--json", "--first", "d", "--nodes", "4").out)
    assert planned["stages"][0]["node"] == "d"
    assert len(planned["stages"]) == 4
    planned = json.loads(run(*IMAGINED, "--json", "--exclude", "a").out)
    assert {"node": "a", "reason": "excluded by --exclude"} in planned["left_out"]


def test_what_does_not_fit_ends_with_the_sum_and_six(run: Run) -> None:
    short = run("plan", "llama-3.3-70b:bf16", "--emulate", "2x rtx4090")
    assert short.code == 6
    for part in ("  needed  ", "  free on a", "missing", "WHAT WOULD HELP"):
        assert part in short.out
    done = run("plan", "llama-3.3-70b:bf16", "--emulate", "2x rtx4090", "--json")
    assert done.code == 6
    assert json.loads(done.out)["missing_bytes"] > 0


def test_force_is_advised_only_where_it_helps(run: Run) -> None:
    flags = ("plan", "gemma-4-31b:q4_k_m", "--emulate", "rtx4090 24GB")
    assert "--force" not in run(*flags, "--context", "200000").out
    short = run(*flags, "--context", "13000")
    assert (short.code, "--force" in short.out) == (6, True)
    assert run(*flags, "--context", "13000", "--force").code == 0


def test_a_machine_that_is_left_out_is_in_no_sum(run: Run) -> None:
    short = run("plan", "llama-3.3-70b:bf16", "--emulate", "4x rtx4090 24GB", "--exclude", "a,b")
    assert short.code == 6
    assert "free on a" not in short.out
    assert "96.3 GB" in short.out, "missing, as the error says"
    assert "96.3 GB missing; free: c 22.5 GB, d 22.5 GB" in short.err
    empty = run("plan", "qwen3-8b", "--emulate", "2x rtx4090", "--exclude", "a,b")
    assert (empty.code, empty.out) == (2, "")
    assert "--exclude leaves out every node" in empty.err


def test_data_sheets_know_one_number_format(run: Run) -> None:
    refused = run("plan", "qwen3-8b", "--emulate", "2x rtx4090", "--dtype", "float32")
    assert (refused.code, refused.out) == (2, "")
    assert "--emulate plans in bfloat16" in refused.err
    assert run("plan", "qwen3-8b", "--emulate", "2x rtx4090", "--dtype", "bfloat16").code == 0


def test_changes_are_answered_where_the_base_does_not_fit(run: Run) -> None:
    flags = ("plan", "llama-3.3-70b:bf16", "--emulate", "2x rtx4090", "--what-if", "add m3ultra")
    shown = run(*flags)
    assert shown.code == 0
    assert "fits only with the changes (add m3ultra); now the model needs about" in shown.out
    planned = json.loads(run(*flags, "--json").out)
    assert planned["fits_only_with"]["changes"] == "add m3ultra"
    assert {stage["device"] for stage in planned["stages"]} - {"NVIDIA GeForce RTX 4090 (emulated)"}
    assert run("plan", "llama-3.3-70b:bf16", "--emulate", "2x rtx4090", "--what-if", "add m1").code == 6


def test_too_few_machines_are_no_lack_of_memory(run: Run) -> None:
    short = run(*IMAGINED, "--nodes", "5")
    assert short.code == 6
    assert "5 nodes are wanted, 4 can compute" in short.err
    assert "WHAT WOULD HELP" not in short.out


@pytest.mark.parametrize(
    "flags",
    [
        ("--nodes", "2", "--plan", "a:0-31,b:32-63"),
        ("--first", "a", "--plan", "a:0-31,b:32-63"),
        ("--first", "a", "--exclude", "a"),
        ("--exclude", "nobody"),
        ("--nodes", "65"),
        ("--plan", "a:0-31,b:33-63"),
        ("--objective", "fame"),
        ("--dtype", "int4"),
        ("--context", "99999999"),
        ("--what-if", "buy a house"),
        ("--measure",),
    ],
)
def test_contradictory_wishes_end_with_two_and_one_sentence(run: Run, flags: tuple[str, ...]) -> None:
    refused = run(*IMAGINED, *flags)
    assert refused.code == 2
    assert refused.err.startswith("\nerror: ") or refused.err.startswith("error: ")
    assert "Traceback" not in refused.err


def test_a_link_without_devices_and_no_node_are_told_apart(run: Run) -> None:
    assert run("plan", "qwen2.5-32b", "--link", "1gbit").code == 2
    assert run("plan", "qwen2.5-32b").code == 3


def test_an_error_of_the_survey_ends_with_its_own_exit_code(run: Run, tmp_path: Path) -> None:
    vanishing = NodeUnreachable("node studio is not in the cluster now", next_step="see 'edgepipe status'")
    with answering(tmp_path / "data", FakeNode(survey=vanishing)):
        gone = run("plan", "qwen2.5-32b")
    assert gone.code == 3
    assert gone.err.strip().splitlines() == [
        "error: node studio is not in the cluster now",
        "   try: see 'edgepipe status'",
    ]


def test_force_plans_as_if_all_memory_were_free(run: Run) -> None:
    tight = ("plan", "qwen2.5-14b", "--emulate", "rtx4090, m1", "--json")
    whole = json.loads(run(*tight, "--force").out)
    free = json.loads(run(*tight).out)
    assert sum(stage["free_bytes"] for stage in whole["stages"]) > sum(stage["free_bytes"] for stage in free["stages"])


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("--rebalance",), 3),  # understood; but no node runs
        (("--rebalance", "auto"), 3),
        (("--rebalance", "--nodes", "2"), 3),
        (("--rebalance=soon",), 2),
        (("--rebalance", "auto", "--plan", "a:0-1"), 2),
    ],
)
def test_rebalance_may_stand_alone(run: Run, flags: tuple[str, ...], code: int) -> None:
    assert run("serve", "demo", *flags).code == code


def test_a_name_without_a_type_is_planned_in_q4_k_m(run: Run) -> None:
    planned = json.loads(run("plan", "qwen3.6", "--emulate", "rtx4090", "--json").out)
    assert planned["model"] == "qwen3.6-35b-a3b:q4_k_m"
    assert "qwen3.8-27b:q4_k_m · whole on one machine" in run("plan", "Qwen3.8 27B", "--emulate", "rtx4090").out
    wide = run("plan", "Qwen/Qwen3.6-35B-A3B", "--emulate", "rtx4090")
    assert (wide.code, "qwen3.6-35b-a3b:bf16 does not fit: needs 69." in wide.out) == (6, True)


def test_a_type_without_a_published_rule_is_planned_and_its_size_called_an_estimate(run: Run) -> None:
    shown = run("plan", "qwen3.6-27b:UD-Q4_K_XL", "--emulate", "rtx4090")
    assert shown.code == 0
    assert "UD-Q4_K_XL has no published rule: sizes are those of Q4_K_M" in shown.err


def test_an_unknown_model_is_refused_with_the_nearest_three(run: Run) -> None:
    refused = run("plan", "lama 3.3 70b", "--emulate", "rtx4090")
    assert refused.code == 7
    assert "nearest known names: llama-3.3-70b, " in " ".join(refused.err.split())


@pytest.mark.parametrize(
    ("devices", "device", "link"),
    [
        ("cpu 6 cores 32GB", "CPU, 6 cores", "gigabit"),
        ("2x 7900 XTX", "AMD Radeon RX 7900 XTX", "2.5g"),
        ("DGX Spark", "NVIDIA DGX Spark", "Thunderbolt 4"),
        ("Ryzen AI Max+ 395", "AMD Ryzen AI Max+ 395", "wifi"),
    ],
)
def test_machines_and_links_at_home_have_names(run: Run, devices: str, device: str, link: str) -> None:
    planned = json.loads(run("plan", "qwen3:4b", "--emulate", devices, "--link", link, "--json").out)
    assert {stage["device"] for stage in planned["stages"]} == {device}
