"""Sentences that people stumbled over, as they read now."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from edgepipe.cli import inviting, node_start
from edgepipe.cli.doctor.findings import NetworkFacts, Ports, clock_finding, firewall_remedy, network_findings
from edgepipe.cli.doctor.machine_findings import backend_finding, backend_state, nft_drops
from edgepipe.cli.doctor.node_findings import trust_findings
from edgepipe.cli.views.report_view import TERMS
from edgepipe.cli.views.status_view import layout_text
from edgepipe.cli.wizard import cluster_choice, steps
from edgepipe.cli.wizard.asking import AskedChoice, Defaults, Quit
from edgepipe.cli.wizard.state import Given, Setup
from edgepipe.cluster.discovery import Announcement
from edgepipe.cluster.founding import TrustFolders
from edgepipe.config import load_config
from edgepipe.daemon.machine.backends import check_device
from edgepipe.errors import ConfigInvalid, NoPeersFound
from edgepipe.ids import NodeId
from edgepipe.spec.facts import LayerRange
from edgepipe.store.store import ModelStore
from edgepipe.telemetry.audit import AuditKind, AuditLog
from edgepipe.wire.trust import InviteEvent, InviteJoined, InviteStart
from tests.support.daemon.admin_server import FakeNode, answering
from tests.support.processes.command_line import Run


@pytest.mark.parametrize(
    ("words", "code", "shown"),
    [
        (
            ("plan", "deepthought-42b", "--emulate", "m4max"),
            7,
            "no model is called 'deepthought-42b'\n       nearest known names: ",
        ),
        (("plan", "gemma-4-e4b:q4_k_m", "--emulate", "m4max"), 7, "edgepipe does not serve 'gemma-4-e4b:q4_k_m'"),
        (("plan", "llama-3.1-8b", "--emulate", "2x m4max", "--link", "fibre"), 2, "'fibre' is not a valid link"),
        (
            ("plan", "llama-3.1-8b", "--emulate", "2x m4max", "--link", "fibre"),
            2,
            "thunderbolt, ideal), or rate and one-way latency: 1gbit,0.3ms",
        ),
    ],
)
def test_what_a_verb_does_not_know_it_says_with_what_it_knows(
    run: Run, words: tuple[str, ...], code: int, shown: str
) -> None:
    done = run(*words)
    assert done.code == code
    assert shown in done.err


def test_an_interrupted_pull_says_what_is_kept(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = tmp_path / "data" / "models" / ".pulling-org--name+q4_k_m"

    def interrupted(*args: object, **keywords: object) -> None:
        begun.mkdir(parents=True)
        (begun / "model.safetensors").write_bytes(bytes(3_000_000))
        raise KeyboardInterrupt

    monkeypatch.setattr(ModelStore, "pull", interrupted)
    done = run("models", "pull", "org/name:q4_k_m", "--json")
    assert (done.code, done.out) == (130, "")
    assert done.err == "3.0 MB are kept; the same command goes on from there\n"


@pytest.mark.parametrize("peer", ["10.0.0.2:99999", "10.0.0.2:", ":7117", "10.0.0.2:٧", "[fd00::1]:x"])
def test_doctor_refuses_an_address_that_cannot_be_one(run: Run, peer: str) -> None:
    done = run("doctor", "--peer", peer)
    assert (done.code, done.out) == (2, "")
    assert f"--peer cannot be '{peer}'" in done.err


@pytest.mark.parametrize(
    ("words", "step"),
    [
        (("models", "remove", "a b"), "edgepipe models rm 'a b'"),
        (("remove", "x"), "edgepipe models rm x"),
        (("models", "ls"), "edgepipe models list"),
        (("load", "x"), "edgepipe serve x"),
        (("node", "ls"), "edgepipe status"),
    ],
)
def test_verbs_of_other_programs_lead_to_ours(run: Run, words: tuple[str, ...], step: str) -> None:
    done = run(*words)
    assert done.code == 2
    assert done.err.endswith(f"   try: {step}\n")


def test_settings_are_shown_as_they_are_written(run: Run) -> None:
    assert "discovery           true" in run("config", "show").out
    assert run("config", "set", "discovery", "true").code == 0


def test_an_address_of_ipv6_stands_in_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    ready = {"name": "a", "cluster": "home", "address": "10.0.0.2:7117", "http_host": "fd00::5", "http_port": 8117}
    node_start._show_ready({**ready, "key_file": "", "key_on_loopback": False, "pid": 1})  # pyright: ignore[reportPrivateUsage]
    shown = capsys.readouterr().out
    assert "  API     http://[fd00::5]:8117/v1\n" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_who_quits_the_setup_is_told_what_happened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Announcement] = []
    monkeypatch.setattr(cluster_choice, "browse_nodes", lambda setup: found)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    monkeypatch.setattr(cluster_choice, "explain_silence", lambda setup: None)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]

    class Quits(Defaults):
        def choose(self, question: str, choices: Sequence[AskedChoice], *, default: str) -> str:
            return "quit"

    setup = Setup(
        asking=Quits(),
        given=Given(),
        config=load_config({"data_dir": tmp_path}).values,
        settings_file=tmp_path / "s",
    )
    with pytest.raises(NoPeersFound, match="no edgepipe node was found on this network"):
        steps.cluster(setup)
    found.append(
        Announcement(cluster_id="c", cluster_name="home", node_id="b", node_name="studio", host="10.0.0.2", port=7117)
    )
    with pytest.raises(Quit):
        steps.cluster(setup)


def test_an_unknown_setting_is_called_that() -> None:
    with pytest.raises(ConfigInvalid, match=r"^unknown setting 'nmae' \(EDGEPIPE_NMAE\)"):
        load_config({}, environ={"EDGEPIPE_NMAE": "x"})


def test_a_machine_without_a_network_or_a_backend_is_told_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = NetworkFacts(interface="", address="", wireless=False, speed_bits_per_s=0.0, mtu_bytes=0)
    [finding] = network_findings(facts, Ports(node=7117, http=8117))
    assert (finding.what, finding.fact) == ("no usable network connection", "")

    def nothing(name: str) -> None:
        return None

    monkeypatch.setattr(importlib.util, "find_spec", nothing)
    assert backend_finding().what == "this machine can chat and show status, but cannot run a model yet"


@pytest.mark.parametrize(
    ("have", "macos", "fact", "remedy"),
    [
        (["torch"], "13.6.9", "MLX needs macOS 14 or later; this is macOS 13.6.9", "update macOS, then: "),
        (["torch"], "14.5", "", "edgepipe update --extra mlx"),
        ([], "13.6.9", "neither torch nor mlx is installed", "edgepipe update --extra torch"),
        ([], "14.0", "neither torch nor mlx is installed", "edgepipe update --extra mlx"),
        (["mlx"], "14.0", "", ""),
    ],
)
def test_a_mac_is_advised_what_its_macos_can_have(have: list[str], macos: str, fact: str, remedy: str) -> None:
    found = backend_state(have, macos=macos, has_gpu=False)
    assert found.fact == fact
    assert found.remedy.startswith(remedy)
    assert bool(found.remedy) == bool(remedy)


def test_a_new_owner_is_introduced_by_what_it_may_do(capsys: pytest.CaptureFixture[str]) -> None:
    joined = InviteJoined(name="studio", role="owner", node_id=NodeId("b"))
    inviting.show(InviteEvent(event=joined), InviteStart())
    shown = capsys.readouterr().out
    assert shown == "  ✓ 'studio' joined\n    It can also manage the cluster if this machine is lost.\n"


def test_a_drained_machine_is_safe_to_switch_off(run: Run, tmp_path: Path) -> None:
    with answering(tmp_path / "data", FakeNode()):
        assert run("node", "drain").out == "safe to switch off now\n"


def test_a_missing_pairing_code_is_told_with_its_flags(tmp_path: Path) -> None:
    setup = Setup(
        asking=Defaults(),
        given=Given(),
        config=load_config({"data_dir": tmp_path}).values,
        settings_file=tmp_path / "s",
    )
    with pytest.raises(ConfigInvalid, match="a pairing code is needed") as raised:
        cluster_choice.join_asking(setup, "127.0.0.1")
    assert raised.value.next_step == "--join CODE, or --cluster NAME to start a new cluster"


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        ("1 connection", "1 connection ended before it said who it is"),
        ("30 connections", "30 connections ended before they said who they are"),
    ],
)
def test_refused_handshakes_read_as_a_sentence(run: Run, tmp_path: Path, count: str, shown: str) -> None:
    path = TrustFolders(tmp_path / "data").audit
    path.parent.mkdir(parents=True)
    AuditLog(path, time.time).record(AuditKind.HANDSHAKE_REFUSED, who="strangers", detail=count)
    assert run("peers", "log").out.strip().endswith(shown)
    findings = list(trust_findings(load_config({"data_dir": tmp_path / "data"}).values, None))
    assert [finding.fact for finding in findings] == ([f"the last: {shown}"] if count.startswith("30") else [])


@pytest.mark.parametrize(
    ("address", "shown"), [("10.0.0.2:7117", "http://10.0.0.2:8117/v1"), ("[fd00::5]:7117", "http://[fd00::5]:8117/v1")]
)
def test_a_node_that_listens_everywhere_names_an_address_that_others_reach(
    capsys: pytest.CaptureFixture[str], address: str, shown: str
) -> None:
    ready = {"name": "a", "cluster": "home", "address": address, "http_host": "0.0.0.0", "http_port": 8117}
    node_start._show_ready({**ready, "key_file": "", "key_on_loopback": False})  # pyright: ignore[reportPrivateUsage]
    assert f"  API     {shown}\n" in capsys.readouterr().out


def test_clocks_that_differ_by_days_are_told_in_days() -> None:
    assert clock_finding("studio", skew_ms=864e6).fact.startswith("by 10 d 0 h; ")


@pytest.mark.parametrize(
    ("rules", "drops"),
    [
        ("", False),
        ("table inet f {\n\tchain input {\n\t\ttype filter hook input priority 0; policy drop;\n\t}\n}", True),
        ("table inet f {\n\tchain in {\n\t\ttype filter hook input priority 0; policy accept;\n\t}\n}", False),
        (
            "table ip f {\n chain in {\n  type filter hook input priority 0; policy accept;\n"
            "  tcp dport 7117-7133 reject\n }\n}",
            True,
        ),
        (
            "table ip f {\n chain in {\n  type filter hook input priority 0; policy accept;\n  ct state invalid drop\n"
            " }\n chain fwd {\n  type filter hook forward priority 0; policy drop;\n }\n}",
            False,
        ),
    ],
)
def test_rules_of_nftables_that_drop_what_comes_in_are_a_firewall(rules: str, drops: bool) -> None:
    assert nft_drops(rules) is drops
    assert "tcp dport 7117-7133 accept" in firewall_remedy("nftables", "10.0.0.2", Ports(node=7117, http=8117))


def test_a_cuda_device_without_a_driver_is_refused_before_the_node_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")
    with pytest.raises(ConfigInvalid, match="no device 'cuda:0'"):
        check_device("cuda:0", exists=lambda path: False)
    check_device("cuda:0", exists=lambda path: path == "/dev/nvidia0")
    check_device("cpu", exists=lambda path: False)


def test_every_abbreviation_of_a_report_is_explained_under_its_table() -> None:
    explained = " ".join(TERMS)
    for term in ("TTFT", "ITL", "TPOT", "bubble", "busy", "M:", "p95", "prefix hits"):
        assert term in explained


def test_a_single_layer_is_one_number() -> None:
    assert LayerRange(29, 30).shown == "29"
    assert LayerRange(0, 29).shown == "0-28"
    assert layout_text("a:0-28,b:29-29") == "layers 0-28 on a, 29 on b"
