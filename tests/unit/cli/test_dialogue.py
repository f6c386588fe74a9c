"""What a conversation keeps, saves, loads and counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgepipe.cli.chat import slash
from edgepipe.cli.chat.conversation import Answer
from edgepipe.cli.chat.dialogue import Dialogue
from edgepipe.cli.chat.slash import COMMANDS, Talk, complete, run_command
from edgepipe.cli.find import Target
from edgepipe.cli.views.status_view import drafts_in_words
from edgepipe.errors import RequestInvalid
from edgepipe.wire.engines import DraftState
from edgepipe.wire.nodes import ClusterStatus
from tests.support.processes.command_line import make_status, with_engine


def answer(text: str, *, reasoning: str = "", first_word_s: float = 1.0, tokens_per_s: float = 0.0) -> Answer:
    """Of seven tokens, on two nodes."""
    return Answer(
        text=text,
        reasoning=reasoning,
        finish_reason="stop",
        num_tokens=7,
        num_prompt_tokens=5,
        first_word_s=first_word_s,
        tokens_per_s=tokens_per_s,
        num_nodes=2,
    )


def dialogue() -> Dialogue:
    """One question and its answer."""
    chat = Dialogue(system="be brief", options={"temperature": 0.0, "seed": None})
    chat.ask("why?")
    chat.answered(answer("because"))
    return chat


def test_an_unanswered_question_is_forgotten_and_a_cut_answer_kept() -> None:
    chat = dialogue()
    chat.ask("and?")
    chat.answered(answer(""))
    chat.forget_unanswered()
    assert [turn["content"] for turn in chat.messages()] == ["be brief", "why?", "because"]
    chat.ask("and?")
    chat.answered(answer("it"))
    assert chat.turns[-1] == {"role": "assistant", "content": "it"}


def test_an_answer_taken_back_stands_again_if_there_is_no_other() -> None:
    chat = dialogue()
    chat.take_back()
    assert chat.turns == [{"role": "user", "content": "why?"}]
    chat.answered(answer(""))
    chat.forget_unanswered()
    assert chat.turns[-1]["content"] == "because"
    chat.take_back()
    chat.answered(answer("therefore"))
    assert [turn["content"] for turn in chat.turns] == ["why?", "therefore"]
    with pytest.raises(RequestInvalid, match="no answer"):
        Dialogue(system="", options={}).take_back()


def test_settings_are_typed_and_can_be_taken_back() -> None:
    chat = dialogue()
    chat.set("temperature", "0.7")
    chat.set("max_tokens", "20")
    assert chat.options == {"temperature": 0.7, "seed": None, "max_tokens": 20}
    chat.set("temperature", "default")
    assert chat.options["temperature"] is None
    with pytest.raises(RequestInvalid, match="whole number"):
        chat.set("seed", "x")
    with pytest.raises(RequestInvalid, match="unknown setting 'heat'"):
        chat.set("heat", "1")
    for name, text in (("temperature", "9"), ("temperature", "nan"), ("top_k", "-1"), ("max_tokens", "0")):
        with pytest.raises(RequestInvalid, match=f"{name} cannot be {text}"):
            chat.set(name, text)


def test_another_answer_is_drawn_even_where_answers_are_not() -> None:
    chat = dialogue()
    chat.set("seed", "4")
    assert chat.request_options({}) == {"temperature": 0.0, "seed": 4}
    chat.take_back()
    assert chat.request_options({}) == {"temperature": 0.7, "seed": None}
    chat.set("temperature", "1.5")
    assert chat.request_options({}) == {"temperature": 1.5, "seed": None}
    chat.answered(answer("therefore"))
    assert chat.request_options({}) == {"temperature": 1.5, "seed": 4}


def test_a_saved_conversation_comes_back(tmp_path: Path) -> None:
    chat = dialogue()
    chat.set("top_k", "5")
    path = tmp_path / "chats" / "a.json"
    chat.save(path, model="org/tiny")
    assert path.stat().st_mode & 0o077 == 0
    other = Dialogue(system="", options={"temperature": 1.0})
    assert other.load(path) == "org/tiny"
    assert other.messages() == chat.messages()
    assert other.options == {"temperature": 0.0, "top_k": 5}


def test_reasoning_stays_beside_the_answer(tmp_path: Path) -> None:
    chat = dialogue()
    assert chat.last_reasoning() == ""
    chat.ask("and?")
    chat.answered(answer("it", reasoning="Let me see."))
    assert chat.messages()[-1] == {"role": "assistant", "content": "it", "reasoning_content": "Let me see."}
    chat.save(tmp_path / "a.json", model="tiny")
    other = Dialogue(system="", options={})
    other.load(tmp_path / "a.json")
    assert other.messages() == chat.messages()
    assert other.last_reasoning() == "Let me see."
    chat.save(tmp_path / "a.md", model="tiny")
    assert "Let me see" not in (tmp_path / "a.md").read_text()


def test_reasoning_that_no_answer_follows_is_forgotten() -> None:
    chat = dialogue()
    chat.ask("and?")
    chat.answered(answer("", reasoning="Let me see."))
    chat.forget_unanswered()
    assert chat.messages() == dialogue().messages()


def test_reasoning_is_shown_in_three_ways() -> None:
    chat = dialogue()
    chat.set_thinking("show")
    with pytest.raises(RequestInvalid, match="cannot be shown as loud"):
        chat.set_thinking("loud")
    assert chat.thinking == "show"
    chat.set("reasoning_effort", "none")
    assert chat.request_options({})["reasoning_effort"] == "none"


def test_it_can_be_read_as_markdown(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    dialogue().save(path, model="tiny")
    assert path.read_text() == "**System**\n\nbe brief\n\n**You**\n\nwhy?\n\n**tiny**\n\nbecause\n"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": "edgepipe-chat-1"}',
        '{"format": "other", "model": "", "system": "", "options": {}, "messages": []}',
        '{"format": "edgepipe-chat-1", "model": "", "system": "", "options": {}, "messages": [{"role": "root"}]}',
    ],
)
def test_a_file_that_is_none_changes_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    chat = dialogue()
    with pytest.raises(RequestInvalid, match="no conversation"):
        chat.load(path)
    assert chat.messages() == dialogue().messages()
    with pytest.raises(RequestInvalid, match="cannot read"):
        chat.load(tmp_path / "none.json")
    with pytest.raises(RequestInvalid, match="cannot write"):
        chat.save(path / "below.json", model="")


def test_what_nobody_set_is_as_the_makers_advise() -> None:
    chat = Dialogue(system="", options={"temperature": None, "top_p": 0.5, "seed": None})
    assert chat.request_options({"temperature": 0.6, "top_p": 0.95, "top_k": 20}) == {
        "temperature": 0.6,
        "top_p": 0.5,
        "top_k": 20,
    }
    chat.set("temperature", "0")
    assert chat.request_options({"temperature": 0.6})["temperature"] == 0


def test_figures_of_the_session() -> None:
    chat = Dialogue(system="", options={})
    assert chat.stats() == "no answer yet"
    for rate, first in ((10.0, 1.0), (20.0, 0.5), (0.0, 3.0)):
        chat.ask("?")
        chat.answered(answer("words", first_word_s=first, tokens_per_s=rate))
    last, prompt, session = chat.stats().splitlines()
    assert last == "last     7 tok · first word 3.0 s · 2 nodes"
    assert prompt == "         5 prompt tokens"
    assert session == "session  3 answers · 21 tok · 15.0 tok/s (mean) · first word 1.0 s (median)"


@pytest.mark.parametrize(("source", "by"), [("mtp", "the model's own layer"), ("model", "the draft model")])
async def test_stats_say_what_drafts_bring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], source: str, by: str
) -> None:
    drafts = DraftState(source=source, windows=90, drafted=200, accepted=150, factor=1.5)
    served = with_engine(make_status(), drafts=drafts)
    talk = Talk(data_dir=tmp_path, target=Target(base_url="", model=served.engines[0].model), dialogue=dialogue())

    async def status(_: Talk) -> ClusterStatus:
        return served

    monkeypatch.setattr(slash, "_status", status)
    await run_command(talk, "/stats")
    shown = " ".join(capsys.readouterr().err.split())
    assert "1 answer · 7 tok" in shown
    assert f"Drafts by {by}: 75% of 200 right · chats with drafts are 1.50 times as fast" in shown


def test_completion_knows_commands_and_their_first_word(tmp_path: Path) -> None:
    talk = Talk(
        data_dir=tmp_path, target=Target(base_url="", model="a"), dialogue=dialogue(), model_names=("alpha", "beta")
    )
    assert list(complete(talk, "/s")) == ["/system", "/set", "/stats", "/save"]
    assert list(complete(talk, "/model b")) == ["beta"]
    assert list(complete(talk, "/think ")) == ["fold", "show", "hide"]
    assert list(complete(talk, "/set top_")) == ["top_p", "top_k"]
    assert list(complete(talk, "/set top_p 1")) == []
    dialogue().save(tmp_path / "chats" / "trip.json", model="")
    assert list(complete(talk, "/load ")) == ["trip"]
    named = {"/help", "/model", "/system", "/set", "/clear", "/regenerate", "/stats", "/nodes", "/plan", "/save"}
    assert named | {"/load", "/bye", "/think"} == set(COMMANDS)


def test_every_setting_goes_back_to_its_default() -> None:
    dialogue = Dialogue(system="", options={"temperature": None})
    for name, text in (("history", "drop"), ("temperature", "0.5")):
        dialogue.set(name, text)
        dialogue.set(name, "default")
    assert (dialogue.history, dialogue.options) == ("stop", {"temperature": None})


def test_windows_in_flight_are_counted() -> None:
    drafts = DraftState(source="model", windows=90, drafted=200, accepted=150, factor=1.5, ahead=40)
    words = "Drafts by the draft model: 75% of 200 right · 40 of 90 windows in flight behind another"
    assert drafts_in_words(drafts) == f"{words} · chats with drafts are 1.50 times as fast"
