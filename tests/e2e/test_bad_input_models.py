"""``edgepipe models pull`` of files that cannot be used: refused in three lines, and nothing is left in the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models.bad import BAD_MODELS, good_folder
from tests.support.processes.bad_input import Shell, error_of

_FAMILIES = {case.split()[0]: case for case in reversed(BAD_MODELS)}  # the first case of each
_CASES = [
    pytest.param(case, id=case, marks=() if case in _FAMILIES.values() else pytest.mark.long) for case in BAD_MODELS
]


@pytest.mark.parametrize("case", _CASES)
def test_a_bad_model_is_refused_and_leaves_nothing(case: str, tmp_path: Path) -> None:
    source = BAD_MODELS[case].spoil(good_folder(tmp_path / "model"))
    shell = Shell(tmp_path)
    error_of(shell.run("models", "pull", str(source)), 7, BAD_MODELS[case].says)
    store = shell.data_dir / "models"
    assert not store.exists() or list(store.iterdir()) == []


def test_the_good_model_from_which_they_are_made_is_pulled(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    done = shell.run("models", "pull", str(good_folder(tmp_path / "model")))
    assert done.returncode == 0, done.stderr
    assert "whole" in shell.run("models", "list").stdout
