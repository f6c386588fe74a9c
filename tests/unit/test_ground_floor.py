"""Units and layer ranges."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe import units
from edgepipe.errors import ConfigInvalid, PlanInvalid
from edgepipe.ids import EngineId, Epoch
from edgepipe.spec.facts import LayerRange, make_slices


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("24GB", 24_000_000_000), ("512MiB", 512 << 20), ("1000", 1000), ("1.5 kb", 1500)]
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert units.parse_bytes(text) == num_bytes


def test_rates_and_durations() -> None:
    assert units.parse_rate("1gbit") == 125_000_000
    assert units.parse_rate("300 mbit/s") == 37_500_000
    assert units.parse_duration_s("0.3ms") == pytest.approx(0.0003)
    assert units.format_bytes(19_300_000_000) == "19.3 GB"
    assert units.format_rate(117_000_000) == "936 Mbit/s"
    assert units.format_duration_s(75) == "1 min 15 s"
    assert units.format_duration_s(7260) == "2 h 1 min"


def test_links() -> None:
    link = units.parse_link("1gbit, 0.3ms")
    assert link.upload_s(125_000) == pytest.approx(0.001)
    assert (link.one_way_s, link.jitter_s) == (pytest.approx(0.0003), 0.0)
    assert units.parse_link("100mbit,5ms,1ms").jitter_s == pytest.approx(0.001)
    assert units.parse_link("ideal").ideal
    assert not units.parse_link("10gbit").ideal


@pytest.mark.parametrize("text", ["", "fast", "0.3ms", "1gbit,fast", "0mbit,1ms", "1gbit,1ms,1ms,1ms", "1gbit,"])
def test_what_is_no_link_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        units.parse_link(text)
    assert "1gbit,0.3ms" in caught.value.next_step


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1 XB", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigInvalid):
        units.parse_bytes(text)


def test_epochs_are_totally_ordered() -> None:
    assert Epoch(1, EngineId("b")) < Epoch(2, EngineId("a")) < Epoch(2, EngineId("b"))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_any_partition_gives_every_layer_exactly_once(sizes: list[int]) -> None:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    ranges = [LayerRange(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    slices = make_slices(ranges, ends[-1])
    assert [layer for part in slices for layer in part.layers] == list(range(ends[-1]))
    assert [part.index for part in slices if part.embedding] == [0]
    assert [part.index for part in slices if part.head] == [len(slices) - 1]


@pytest.mark.parametrize(
    ("ranges", "words"),
    [
        ([(0, 10), (12, 30)], "leaves out layers 10-11"),
        ([(0, 10), (8, 30)], "layers 8-9 twice"),
        ([(0, 10), (10, 29)], "covers 29 layers, the model has 30"),
        ([(1, 30)], "leaves out layer 0"),
    ],
)
def test_gaps_and_overlaps_are_named(ranges: list[tuple[int, int]], words: str) -> None:
    with pytest.raises(PlanInvalid, match=words):
        make_slices([LayerRange(*pair) for pair in ranges], 30)
