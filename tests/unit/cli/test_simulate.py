"""``edgepipe simulate``: the table, JSON, the picture, comparisons, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from edgepipe.cli.views.comparing import read_comparisons
from edgepipe.errors import ConfigInvalid
from tests.support.processes.command_line import Run

SMALL = (
    "simulate",
    "--devices",
    "2x rtx4090",
    "--as-model",
    "qwen2.5-7b:bf16",
    "--requests",
    "8",
    "--output-tokens",
    "16",
)


def test_it_prints_every_figure_in_80_columns(run: Run) -> None:
    result = run(*SMALL)
    assert result.code == 0
    assert max(map(len, result.out.splitlines())) <= 80
    for word in (
        "output tokens/s", "TTFT p50", "ITL p50", "TPOT p50", "p99", "busy a rtx4090 0-", "bubble",
        "tokens/micro-batch", "micro-batches M", "KV mean", "preemptions", "prefix hits", "link 1gbit,0.3ms",
    ):  # fmt: skip
        assert word in result.out


def test_runs_stand_side_by_side(run: Run) -> None:
    result = run(*SMALL, "--compare", "link=ideal,100mbit,5ms", "--compare", "policy=throttled,sarathi", "--json")
    runs = json.loads(result.out)["runs"]
    assert [row["facts"]["label"] for row in runs] == [
        "link=ideal policy=throttled",
        "link=ideal policy=sarathi",
        "link=100mbit,5ms policy=throttled",
        "link=100mbit,5ms policy=sarathi",
    ]
    assert all(row["output_tokens"] == 128 and row["output_tokens_per_s"] > 0 for row in runs)
    table = run(*SMALL, "--compare", "micro-batches=2,4").out
    assert "against the first" in table
    assert "1.00x" in table


def test_equal_seeds_give_equal_figures(run: Run) -> None:
    def figures(seed: str) -> object:
        (row,) = json.loads(run(*SMALL, "--rate", "5", "--seed", seed, "--json").out)["runs"]
        del row["facts"]
        return row

    assert figures("1") == figures("1") != figures("2")


def test_a_picture_is_written(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    result = run(*SMALL, "--compare", "policy=throttled,sarathi", "--plot", str(path))
    assert result.code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_picture_is_refused_before_anything_runs(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run(*SMALL, "--plot", str(tmp_path / "out.png"))
    assert (result.code, result.out) == (2, "")
    assert "edgepipe update --extra plot" in result.err


def test_a_trace_is_read_from_a_file(run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "day.csv"
    trace.write_text("arrival_s, prompt_tokens, output_tokens\n0, 10, 5\n0.5, 20, 6\n")
    (row,) = json.loads(run(*SMALL[:5], "--workload", str(trace), "--json").out)["runs"]
    assert (row["num_requests"], row["output_tokens"]) == (2, 11)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--devices", "4x toaster"), ["toaster", "rtx4090"]),
        (("--link", "fast"), ["fast", "1gbit,0.3ms"]),
        (("--policy", "luck"), ["luck", "throttled"]),
        (("--micro-batches", "none"), ["none", "auto"]),
        (("--workload", "rush-hour"), ["rush-hour", "poisson"]),
        (("--workload", "poisson"), ["--rate"]),
        (("--rate", "3", "--concurrency", "4"), ["contradict"]),
        (("--workload", "fixed", "--rate", "3"), ["poisson"]),
        (("--lengths", "sharegpt", "--prompt-tokens", "5"), ["--lengths fixed"]),
        (("--lengths", "novel"), ["sharegpt"]),
        (("--compare", "mood=good,bad"), ["mood", "policy"]),
        (("--compare", "policy=throttled,"), ["empty"]),
        (("--compare", "rate=fast"), ["fast", "--rate"]),
        (("--plot", "/nowhere/at/all/out.png"), ["no folder"]),
        (("--plot", "out.doc"), ["out.doc", "png"]),
    ],
)
def test_nonsense_is_refused_with_what_was_expected(run: Run, flags: tuple[str, ...], words: list[str]) -> None:
    result = run("simulate", *flags)
    assert (result.code, result.out) == (2, "")
    assert [word for word in words if word not in result.err] == []


def test_a_compared_run_that_does_not_fit_is_named(run: Run) -> None:
    result = run("simulate", "--compare", "layout=pipeline,replicas")
    assert (result.code, result.out) == (6, "")
    assert result.err.startswith("error: layout=replicas: the model needs")


def test_a_bad_line_of_a_trace_is_named(run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "day.csv"
    trace.write_text("0, 10, 5\n0.5, twenty, 6\n")
    result = run("simulate", "--workload", str(trace))
    assert result.code == 2
    assert "line 2 of day.csv" in result.err
    assert "arrival_s, prompt_tokens, output_tokens" in result.err


def test_models_that_are_unknown_or_too_large(run: Run) -> None:
    assert run("simulate", "--as-model", "gpt-9").code == 7
    assert run("simulate", "--devices", "1x rtx4090").code == 6


def test_values_of_comparisons() -> None:
    def values(text: str) -> list[str]:
        (key,) = {key for variant in read_comparisons([text], keys=("link", "devices")) for key in variant.changes}
        return [variant.changes[key] for variant in read_comparisons([text], keys=("link", "devices"))]

    assert values("link=ideal,1gbit,0.3ms,100mbit,5ms,1ms") == ["ideal", "1gbit,0.3ms", "100mbit,5ms,1ms"]
    assert values("devices=4x rtx4090; 2x m4max, 1x rtx4090") == ["4x rtx4090", "2x m4max, 1x rtx4090"]
    assert [variant.label for variant in read_comparisons([], keys=())] == [""]
    with pytest.raises(ConfigInvalid, match="twice"):
        read_comparisons(["link=ideal", "link=1gbit"], keys=("link",))
    with pytest.raises(ConfigInvalid, match="too many"):
        read_comparisons([f"link={','.join(f'{i}mbit' for i in range(1, 18))}"], keys=("link",))


def test_drafts_by_the_model_s_own_layer_are_simulated(run: Run) -> None:
    lone = (
        "simulate",
        "--devices",
        "2x rtx4090",
        "--requests",
        "1",
        "--output-tokens",
        "400",
        "--draft",
        "mtp",
        "--json",
    )
    (row,) = json.loads(run(*lone, "--as-model", "qwen3.6-27b:q4_k_m").out)["runs"]
    (plain,) = json.loads(run(*lone, "--as-model", "qwen3.6-27b:q4_k_m", "--draft", "off").out)["runs"]
    assert 1.3 < row["output_tokens_per_s"] / plain["output_tokens_per_s"] < 2.7
    refused = run(*lone, "--as-model", "llama-3.1-8b")
    assert refused.code == 2
    assert "cannot draft with a layer of its own" in refused.err
