"""What the wizard says of links, which settings it writes, and what answers for nobody."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from edgepipe_emulated import emulated_model_config

from edgepipe.cli import models
from edgepipe.cli.settings_file import write_settings
from edgepipe.cli.wizard import cluster_choice, model_choice, own_node, run, steps
from edgepipe.cli.wizard.asking import AskedChoice, Back, Defaults
from edgepipe.cli.wizard.fits import HEADING, Fit, best_fit, fitting_models
from edgepipe.cli.wizard.links import MachineLink, link_meaning, links_of
from edgepipe.cli.wizard.state import Given, Setup
from edgepipe.config import load_config
from edgepipe.errors import ConfigInvalid, ModelDownloadFailed
from edgepipe.ids import NodeId
from edgepipe.store.store import ModelStore
from edgepipe.store.typed_names import understood
from edgepipe.weights.emulated_folder import write_model_folder
from edgepipe.wire.nodes import ClusterStatus, DeviceState, MemberState, NodeState
from edgepipe.wire.serving import LinkProfile
from edgepipe.wire.trust import PeerState
from tests.support.processes.command_line import Run, make_status, with_devices
from tests.support.processes.terminal import Terminal as TerminalOf


@pytest.mark.parametrize(
    ("rtt_ms", "bytes_per_s", "good", "words"),
    [
        (0.4, 117e6, True, "0.4 ms, 936 Mbit/s: fine for 2 stages of a 32B model"),
        (7.8, 18e6, False, "cables on both ends help"),
        (60.0, 0.0, False, "slow: each token of a 32B model over 2 stages takes 60 ms longer"),
        (3.0, 10e6, False, "a prompt of 1000 tokens 1.0 s"),
        (0.0, 0.0, True, "not measured yet"),
    ],
)
def test_what_a_link_means(rtt_ms: float, bytes_per_s: float, good: bool, words: str) -> None:
    meaning = link_meaning(rtt_ms=rtt_ms, bytes_per_s=bytes_per_s)
    assert meaning.good is good
    assert words in meaning.text


def test_both_directions_make_one_link() -> None:
    ways = [
        LinkProfile(sender="me", receiver="b", one_way_s=0.001, bytes_per_s=100e6),
        LinkProfile(sender="b", receiver="me", one_way_s=0.002, bytes_per_s=50e6),
        LinkProfile(sender="b", receiver="c", one_way_s=1.0, bytes_per_s=1.0),
    ]
    assert links_of("me", ways) == {"b": MachineLink(rtt_ms=1.0 + 2.0, bytes_per_s=50e6)}


def test_settings_are_changed_and_comments_stay(tmp_path: Path) -> None:
    path = tmp_path / "edgepipe" / "config.toml"
    write_settings(path, {"name": "gamer"})
    path.write_text("# mine\nport = 7200  # not 7117\n" + path.read_text())
    write_settings(path, {"name": "studio"})
    assert path.read_text() == '# mine\nport = 7200  # not 7117\nname = "studio"\n'
    path.write_text("name = ")
    with pytest.raises(ConfigInvalid, match="cannot be changed"):
        write_settings(path, {"name": "x"})
    assert path.read_text() == "name = "


def measured_status(*, bytes_per_s: float = 1e12) -> ClusterStatus:
    """Two nodes with 20 GB each and memory of that rate."""

    def measured(device: DeviceState) -> DeviceState:
        assert device.profile is not None
        profile = replace(
            device.profile, bandwidth_bytes_per_s=bytes_per_s, flops=1e14, memory_total_bytes=24_000_000_000
        )
        return replace(device, profile=profile, free_bytes=20_000_000_000)

    return with_devices(make_status(), measured)


def test_models_that_fit_come_with_an_estimate() -> None:
    good, bad = fitting_models(measured_status())
    assert "demo" in [fit.source for fit in good]
    assert all("tok/s" in fit.text for fit in good)
    assert "llama-3.3-70b:q4_k_m" in [fit.source for fit in bad]
    assert "does not fit" in bad[0].text
    offered = {fit.source.partition(":")[0] for fit in (*good, *bad)}
    assert {"qwen3.6-35b-a3b", "qwen3.8-27b", "gemma-4-26b-a4b", "gpt-oss-20b", "glm-4.7-flash"} <= offered
    for fit in (*good, *bad):
        assert understood(fit.source) is not None, f"'{fit.source}' cannot be pulled as printed"
        assert fit.text[: HEADING.index("SIZE") + len("SIZE")].endswith(("GB", "MB")), "the heading is above the column"


def test_the_largest_usable_model_is_preferred() -> None:
    assert best_fit([]) is None
    found = [Fit(source=name, text="", tokens_per_s=rate) for name, rate in (("a", 0.1), ("b", 6.0), ("c", 40.0))]
    assert best_fit(found) is found[1]
    assert best_fit(found[:1]) is found[0]
    slow, _ = fitting_models(measured_status(bytes_per_s=10e9))
    assert slow[0].tokens_per_s < 1
    assert "<1 tok/s" in slow[0].text
    best = best_fit(slow)
    assert best is not None
    assert best.tokens_per_s >= 5


class Chosen(Defaults):
    """Takes every default, and remembers what there was to choose from."""

    def __init__(self) -> None:
        self.choices: dict[str, str] = {}
        self.default = ""

    def choose(self, question: str, choices: Sequence[AskedChoice], *, default: str) -> str:
        """The default."""
        self.choices, self.default = {choice.value: choice.text for choice in choices}, default
        return default


def make_setup(tmp_path: Path, given: Given | None = None) -> Setup:
    """Nobody sits there."""
    config = load_config({"data_dir": tmp_path}, environ={}).values
    return Setup(asking=Chosen(), given=given or Given(), config=config, settings_file=tmp_path / "config.toml")


@pytest.mark.parametrize("running", [True, False])
def test_a_name_and_a_folder_that_were_given_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], running: bool
) -> None:
    monkeypatch.setattr(own_node, "node_status", lambda setup: make_status() if running else None)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    setup = make_setup(tmp_path, Given(name="den", models_dir=True))
    steps.machine(setup)
    values = load_config({}, environ={}, file=setup.settings_file).values
    assert (values.name, values.models_dir) == ("den", tmp_path / "models")
    assert setup.name == ("gamer" if running else "den")
    warned = "reads its new models_dir and name at its next start" in " ".join(capsys.readouterr().out.split())
    assert warned is running


def test_an_address_with_a_bad_port_is_told_and_asked_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not cluster_choice.reachable(make_setup(tmp_path), "studio:abc")
    assert "the host cannot be 'studio:abc'" in capsys.readouterr().out


def failing_pull(root: Path, model: str) -> None:
    raise ModelDownloadFailed(f"'{model}' cannot be fetched", fact="the hub cannot be reached")


ASK = """
from edgepipe.config import forget_exported_size
from edgepipe.cli.wizard.asking import AskedChoice, Terminal
line = "HuggingFaceTB/SmolLM2-1.7B-Instruct     3.4 GB  workstation ~120 tok/s  begun"
choices = [AskedChoice(value="a", text=line), AskedChoice(value="b", text="the last one")]
forget_exported_size()
print("chosen:", Terminal().choose("Which model?", choices, default="a"))
"""


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_long_choices_are_broken_between_words(columns: int) -> None:
    stale = {**os.environ, "COLUMNS": "90"}  # as exported before the window changed
    with TerminalOf([sys.executable, "-P", "-c", ASK], environment=stale, columns=columns, lines=20) as terminal:
        shown = terminal.until("the last one")
        terminal.send("\r")
        terminal.until("chosen: a")
    first, *rest = shown.partition("»")[2].partition("  the last one")[0].splitlines()
    assert first.startswith(" HuggingFaceTB/SmolLM2-1.7B-Instruct     3.4 GB")
    assert " ".join([first, *rest]).split()[1:] == ["3.4", "GB", "workstation", "~120", "tok/s", "begun"]
    assert all(line.startswith("     ") for line in rest if line.strip())
    assert bool("".join(rest).strip()) == (columns < 120)


class _Typed(Defaults):
    """Types ``<`` a number of times before it takes the default."""

    def __init__(self, times: int) -> None:
        self.left, self.asked = times, 0

    def text(
        self, question: str, *, default: str = "", check: Callable[[str], str] = lambda _: "", flags: str = ""
    ) -> str:
        """Go back, then take the default."""
        self.asked += 1
        if self.left:
            self.left -= 1
            raise Back
        return default


def test_going_back_from_the_first_question_shows_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(own_node, "node_status", lambda setup: None)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    typed = _Typed(2)
    steps.machine(replace(make_setup(tmp_path), asking=typed))
    shown = capsys.readouterr().out
    assert typed.asked == 3
    assert shown.count("This machine") == 1
    assert shown.count("this is the first question; ^C stops the setup") == 2


def test_going_back_from_the_name_of_the_cluster_chooses_a_cluster_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    created: list[str] = []
    monkeypatch.setattr(own_node, "node_status", lambda setup: None)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    monkeypatch.setattr(cluster_choice, "browse_nodes", lambda setup: [])  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    monkeypatch.setattr(cluster_choice, "explain_silence", lambda setup: None)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    monkeypatch.setattr(cluster_choice, "create_cluster", lambda setup, name, status: created.append(name))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    typed = _Typed(1)
    steps.cluster(replace(make_setup(tmp_path), asking=typed))
    assert (typed.asked, created) == (2, ["home"])
    assert capsys.readouterr().out.count("listening for other nodes") == 2


def test_no_service_is_offered_where_nothing_could_start_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("edgepipe.cli.service.manager_runs", lambda: False)
    asked: list[str] = []
    setup = make_setup(tmp_path)
    monkeypatch.setattr(setup.asking, "confirm", lambda question, default: asked.append(question))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    steps.service(setup)
    assert asked == []
    assert "edgepipe node start --background" in capsys.readouterr().out


def test_the_start_of_the_node_says_how_long_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []

    def start(data_dir: Path, flags: tuple[str, ...], *, name: str) -> dict[str, Any]:
        shown.append(capsys.readouterr().out)
        return {"pid": 1, "address": "10.0.0.1:7117"}

    monkeypatch.setattr(own_node, "node_status", lambda setup: None)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    monkeypatch.setattr(own_node, "start_in_background", start)
    steps.cluster(make_setup(tmp_path, Given(cluster="den")))
    assert "starting the node, about 10 s" in shown[0]


def test_a_failed_download_does_not_end_the_setup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "pull_model", failing_pull)
    monkeypatch.setattr(model_choice, "status_with_devices", lambda data_dir: measured_status())  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    setup = make_setup(tmp_path)
    steps.model(setup)
    shown = capsys.readouterr().out
    assert "cannot be fetched" in shown
    assert f"later: edgepipe models pull {setup.asking.default}" in shown  # pyright: ignore[reportAttributeAccessIssue]
    assert (setup.model, setup.failure) == ("", None)


def test_the_running_node_learns_of_the_fetched_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Path, list[str]]] = []
    setup = make_setup(tmp_path, Given(model=str(tmp_path / "tiny")))
    root = setup.config.models_dir
    monkeypatch.setattr(models, "tell_node", lambda folder: told.append((folder, sorted(os.listdir(root)))))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    write_model_folder(tmp_path / "tiny", emulated_model_config(num_layers=2))
    steps.model(setup)
    assert told == [(setup.data_dir, ["tiny"])]


def test_what_a_flag_asked_for_in_vain_is_an_error_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(models, "pull_model", failing_pull)
    monkeypatch.setattr(run, "STEPS", (steps.model, lambda setup: done.append("boot")))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    with pytest.raises(ModelDownloadFailed):
        run.run_setup(make_setup(tmp_path, Given(model="org/big")))
    assert done == ["boot"]


def test_an_interrupted_download_is_offered_first_and_what_is_here_before_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "pull_model", failing_pull)
    monkeypatch.setattr(model_choice, "status_with_devices", lambda data_dir: measured_status())  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    setup = make_setup(tmp_path)
    asking = setup.asking
    assert isinstance(asking, Chosen)
    write_model_folder(tmp_path / "Qwen3.5-9B", emulated_model_config(num_layers=2))
    ModelStore(setup.config.models_dir).pull(str(tmp_path / "Qwen3.5-9B"))
    steps.model(setup)
    assert asking.default == "qwen3.5-9b:q4_k_m"
    assert asking.choices["qwen3.5-9b:q4_k_m"].endswith("  here")
    begun = setup.config.models_dir / ".pulling-Qwen--Qwen3-4B-GGUF+q4_k_m"
    begun.mkdir()
    (begun / "model.safetensors").write_bytes(bytes(3_000_000))
    steps.model(setup)
    assert asking.default == "qwen3-4b:q4_k_m"
    assert asking.choices["qwen3-4b:q4_k_m"].endswith("  begun")


def test_machines_that_are_off_or_have_no_device_are_not_waited_for() -> None:
    status = make_status()
    assert model_choice.still_measuring(status) == []
    gamer, studio, laptop = with_devices(status, lambda device: replace(device, state="starting")).members
    members = (
        replace(gamer, state="dead"),
        replace(studio, node=replace(studio.node, devices=())),
        replace(laptop, state="alive"),
    )
    assert model_choice.still_measuring(replace(status, members=members)) == ["old-laptop"]


def test_only_those_who_may_come_are_waited_for() -> None:
    near = MemberState(node=NodeState(node_id=NodeId("b")), rtt_ms=0.4)
    status = ClusterStatus(node_id=NodeId("a"), members=(near,))
    states = {"a": "alive", "b": "alive", "c": "left", "d": "dead", "e": "asleep", "f": "unseen", "g": "suspect"}
    peers = [PeerState(node_id=NodeId(key), name=key, state=state, self=key == "a") for key, state in states.items()]
    assert steps.missing_peers(peers, status) == ["f", "g"]


def test_defaults_answer_and_what_has_none_is_an_error() -> None:
    assert Defaults().confirm("?", default=True)
    with pytest.raises(ConfigInvalid, match="a code is needed"):
        Defaults().text("Code:", check=lambda text: "" if text else "type something")


def test_contradicting_flags_are_told(run: Run) -> None:
    result = run("setup", "--yes", "--cluster", "a", "--join", "1234-5678")
    assert result.code == 2
    assert "give one of them" in result.err
    alone = run("setup", "--host", "studio")
    assert (alone.code, "--host goes with --join" in alone.err) == (2, True)
