"""What the wizard says of links, which settings it writes, and what answers for nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgepipe.cli.settings_file import write_settings
from edgepipe.cli.wizard.asking import Defaults
from edgepipe.cli.wizard.fits import fitting_models
from edgepipe.cli.wizard.links import Link, link_meaning, links_of
from edgepipe.errors import ConfigInvalid
from edgepipe.wire.v1 import node_pb2 as pb
from tests.unit.cli.conftest import Run, make_status


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
        pb.LinkProfile(sender="me", receiver="b", one_way_s=0.001, bytes_per_s=100e6),
        pb.LinkProfile(sender="b", receiver="me", one_way_s=0.002, bytes_per_s=50e6),
        pb.LinkProfile(sender="b", receiver="c", one_way_s=1.0, bytes_per_s=1.0),
    ]
    assert links_of("me", ways) == {"b": Link(rtt_ms=1.0 + 2.0, bytes_per_s=50e6)}


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


def test_models_that_fit_come_with_an_estimate() -> None:
    status = make_status()
    for member in status.members:
        for device in member.node.devices:
            device.profile.bandwidth_bytes_per_s, device.profile.flops = 1e12, 1e14
            device.profile.memory_total_bytes, device.free_bytes = int(24e9), int(20e9)
    good, bad = fitting_models(status)
    assert "demo" in [one.source for one in good]
    assert all("tok/s" in one.text for one in good)
    assert "meta-llama/Llama-3.3-70B-Instruct" in [one.source for one in bad]
    assert "does not fit" in bad[0].text


def test_defaults_answer_and_what_has_none_is_an_error() -> None:
    assert Defaults().confirm("?", default=True)
    with pytest.raises(ConfigInvalid, match="a code is needed"):
        Defaults().text("Code:", check=lambda text: "" if text else "type something")


def test_contradicting_flags_are_told(run: Run) -> None:
    result = run("setup", "--yes", "--cluster", "a", "--join", "1234-5678")
    assert result.code == 2
    assert "give one of them" in result.err
