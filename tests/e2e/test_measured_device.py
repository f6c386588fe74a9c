"""``edgepipe doctor --measure`` with real processes: an emulated device, and a part that dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgepipe.cli.doctor.measurement import Measured, measured_from


def doctor(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the verb in a folder, away from the user's settings."""
    environment = {
        **os.environ,
        "HOME": str(folder),
        "EDGEPIPE_BACKEND": "emulated",
        "EDGEPIPE_DEVICE": "rtx4090",
        "EDGEPIPE_BACKEND_OPTIONS": "time_factor=0",
        "COLUMNS": "120",
        **variables,
    }
    command = [sys.executable, "-m", "edgepipe.cli", "doctor", "--measure", "--data-dir", str(folder / "data"), *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def read(file: Path) -> Measured:
    return measured_from(json.loads(file.read_text(encoding="utf-8")))


def test_a_device_is_measured_beside_its_prediction_and_the_file_names_nobody(tmp_path: Path) -> None:
    done = doctor(tmp_path)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("edgepipe-measured-*.json")
    found = read(file)
    assert found.sheet == "NVIDIA GeForce RTX 4090"
    assert {"decode_1", "decode_64", "prompt", "experts_1", "recurrent_16", "memory"} <= found.figures.keys()
    assert found.predicted.keys() >= found.figures.keys() - {"gap", "power"}
    assert not found.failures
    text = file.read_text(encoding="utf-8")
    assert str(tmp_path) not in text
    assert "PREDICTED" in done.stdout
    assert file.name in done.stdout


def test_json_goes_to_standard_output_and_writes_no_file(tmp_path: Path) -> None:
    done = doctor(tmp_path, "--json")
    assert measured_from(json.loads(done.stdout)).backend == "emulated"
    assert not list(tmp_path.glob("*.json"))


def test_parts_that_fail_are_named_and_the_others_are_kept(tmp_path: Path) -> None:
    """The emulated device has room for the layers of the dense model only."""
    done = doctor(tmp_path, "--output", "found.json", EDGEPIPE_BACKEND_OPTIONS="time_factor=0,memory=3GB")
    assert done.returncode == 8, done.stderr
    found = read(tmp_path / "found.json")
    assert found.failures.keys() == {"experts", "recurrent"}
    assert "decode_1" in found.figures
    assert "experts was not measured" in done.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [(("--output", "x.json"), "--measure"), (("--measure", "--peer", "a"), "this machine alone")],
)
def test_flags_that_do_not_go_together_are_refused(words: tuple[str, ...], told: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "edgepipe.cli", "doctor", *words, "--data-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert told in done.stderr
