"""The page of measured devices says what files say, and that no GPU has measured where none has."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from scripts.measured_page import FOLDER, measured_page, read_measurements
from tests.unit.cli.test_measurement import FOUND


def test_a_page_without_files_says_so() -> None:
    page = measured_page([])
    assert "No GPU has measured this version yet." in page
    assert "No Mac has measured this version yet." in page


def test_a_gpu_is_shown_with_its_figures_and_what_is_wrong() -> None:
    page = measured_page([replace(FOUND, failures={"recurrent": "no memory"})])
    assert "No GPU has" not in page
    assert "| llama-3.1-8b:q4_k_m, 1 at once | 120 tok/s | 150 tok/s | 0.80x |" in page
    assert "product Q6_K computes wrong values: 1.5 times its bound" in page
    assert "attention cannot run: not launched" in page
    assert "recurrent was not measured: no memory" in page


def test_every_file_of_the_docs_can_be_read() -> None:
    assert len(read_measurements()) == len(list(FOLDER.glob("*.json")))


def test_files_are_sorted_by_chip(tmp_path: Path) -> None:
    for name, chip in (("a", "Z"), ("b", "A")):
        (tmp_path / f"{name}.json").write_text(json.dumps(replace(FOUND, chip=chip).as_json()))
    assert [found.chip for found in read_measurements(tmp_path)] == ["A", "Z"]
