"""``edgepipe simulate --schedule``: the table, the drawing, JSON, the picture, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.processes.command_line import Run


def test_all_schedules_stand_in_80_columns(run: Run) -> None:
    result = run("simulate", "--schedule", "all")
    assert (result.code, result.err) == (0, "")
    assert max(map(len, result.out.splitlines())) <= 80
    assert "…" not in result.out
    (interleaved,) = (line for line in result.out.splitlines() if line.startswith("interleaved, V=2  "))
    assert interleaved.split()[2:] == ["18.8%", "15.8%", "4", "6", "19.0", "-"]


def test_a_small_one_is_drawn_pass_by_pass(run: Run) -> None:
    lines = run("simulate", "--schedule", "gpipe", "--stages", "2", "--micro-batches", "2").out.splitlines()
    assert lines[-2:] == ["0 00001111········aaaabbbb", "1 ····00001111aaaabbbb····"]


def test_both_ends_of_dualpipe_have_their_own_numbers(run: Run) -> None:
    lines = run("simulate", "--schedule", "dualpipe", "--stages", "2", "--micro-batches", "4").out.splitlines()
    assert lines[-2][2] == "0"
    assert lines[-1][2] == "2"


@pytest.mark.parametrize("sizes", [("1", "1", "1"), ("32", "128", "2"), ("32", "32", "16")])
def test_large_ones_stay_within_the_width(run: Run, sizes: tuple[str, str, str]) -> None:
    stages, count, slices = sizes
    result = run("simulate", "--schedule", "all", "--stages", stages, "--micro-batches", count, "--slices", slices)
    assert result.code == 0
    assert max(map(len, result.out.splitlines())) <= 80


def test_figures_for_scripts(run: Run) -> None:
    flags = ("--schedule", "1f1b,decode", "--stages", "8", "--micro-batches", "32", "--json")
    printed = json.loads(run("simulate", *flags).out)
    assert (printed["stages"], printed["micro_batches"]) == (8, 32)
    plain, many, shared = printed["schedules"]
    assert (plain["name"], plain["peak"], plain["rate"]) == ("1f1b", 8, None)
    assert plain["idle"] == pytest.approx(plain["bubble"]) == pytest.approx(7 / 39)
    assert many["rate"] > 1 > shared["rate"]
    assert many["peak"] is None


def test_sizes_that_do_not_interleave_are_said_beside_the_others(run: Run) -> None:
    several = run("simulate", "--schedule", "all", "--micro-batches", "6")
    assert several.code == 0
    assert "interleaved, V=2: not drawn" in several.out
    alone = run("simulate", "--schedule", "interleaved", "--micro-batches", "6")
    assert (alone.code, alone.out) == (2, "")
    assert "--micro-batches 4" in alone.err


def test_a_picture_is_written(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    assert run("simulate", "--schedule", "1f1b,decode", "--plot", str(path)).code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--schedule", "zigzag"), ["zigzag", "dualpipe", "decode", "all"]),
        (("--schedule", ""), ["no schedule"]),
        (("--schedule", "all", "--stages", "33"), ["33 stages", "32"]),
        (("--schedule", "all", "--micro-batches", "1000"), ["1000 micro-batches", "256"]),
        (("--schedule", "all", "--rate", "3"), ["--rate does not go with --schedule"]),
        (("--schedule", "all", "--devices", "2x rtx4090"), ["--devices does not go with --schedule"]),
        (("--slices", "2"), ["--slices goes with --schedule or --layout interleaved"]),
        (("--schedule", "all", "--plot", "out.doc"), ["out.doc", "png"]),
    ],
)
def test_nonsense_is_refused(run: Run, flags: tuple[str, ...], words: list[str]) -> None:
    result = run("simulate", *flags)
    assert (result.code, result.out) == (2, "")
    assert [word for word in words if word not in result.err] == []
