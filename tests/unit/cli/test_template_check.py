"""``edgepipe models check``: what a model's chat template accepts, and the note of a pull."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgepipe.cli import template_check
from edgepipe.weights.emulated_folder import byte_level_tokenizer
from tests.support.gateways.strict_templates import NEEDS_USER
from tests.support.models.files import hf_values, write_hf_folder
from tests.support.processes.command_line import Run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small model whose template refuses much."""
    folder = write_hf_folder(tmp_path / "tiny", hf_values())
    byte_level_tokenizer(300).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(NEEDS_USER, encoding="utf-8")
    return folder


def without_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_check, "is_installed", lambda: False)


def test_it_prints_what_the_template_makes_of_each_conversation(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_reference(monkeypatch)
    assert run("models", "pull", str(folder)).code == 0
    result = run("models", "check", "tiny")
    assert result.code == 0
    lines = {line.split("  ")[0]: line for line in result.out.splitlines()}
    assert "as sent" in lines["question"]
    assert "repaired" in lines["system alone"]
    assert "no_user: empty user" in lines["system alone"]
    assert "reasoning_effort: xhigh" in lines["effort high"]
    assert "levels of reasoning_effort: low, medium, xhigh" in result.out
    assert "pip install transformers" in result.out
    value = json.loads(run("models", "check", "tiny", "--json").out)
    assert value["plain"]["no_user"] == "empty user"
    alone = next(row for row in value["conversations"] if row["conversation"] == "system alone")
    assert alone == {
        "conversation": "system alone",
        "outcome": "repaired",
        "repairs": ["no_user: empty user"],
        "left_out": [],
        "as_sent": "TemplateError: a user is needed",
        "reason": "",
        "transformers": None,
    }


@pytest.mark.long
def test_it_compares_with_transformers(run: Run, folder: Path) -> None:
    pytest.importorskip("transformers", reason="the reference")
    run("models", "pull", str(folder))
    value = json.loads(run("models", "check", "tiny", "--json").out)
    found = {row["conversation"]: row["transformers"] for row in value["conversations"]}
    assert (found["question"], found["system alone"], found["effort high"]) == ("equal", "refused", "refused")
    assert {row["transformers"] for row in value["conversations"] if row["outcome"] == "as sent"} == {"equal"}


def test_a_model_without_a_template_has_nothing_to_check(run: Run, folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    run("models", "pull", str(folder))
    result = run("models", "check", "tiny")
    assert result.code == 2
    assert "the model has no chat template" in result.err


def test_a_pull_goes_on_and_says_that_a_template_is_no_template(run: Run, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ x", encoding="utf-8")
    result = run("models", "pull", str(folder))
    assert result.code == 0
    assert "the chat template could not be examined" in result.err
    assert json.loads(run("models", "pull", str(folder), "--json").out)["note"].startswith("the chat template")
