"""``docs/usage.md`` lists every metric that a gateway exposes, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.gateways.server import Served

PAGE = Path(__file__).parents[3] / "docs" / "usage.md"
LABELS = {"kind", "weights", "kv", "other", "free", "version"}  # of metrics, and their values

pytestmark = pytest.mark.asyncio(loop_scope="module")


def listed() -> set[str]:
    """The names in the last column of the page's table, without labels."""
    section = PAGE.read_text().partition("### Figures for Prometheus\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line[:1] == "|"]
    return {f"edgepipe_{name}" for row in rows[2:] for name in re.findall(r"`(\w+)`", row[-1])} - {
        f"edgepipe_{label}" for label in LABELS
    }


async def test_the_page_lists_every_metric(shared: Served) -> None:
    text = (await shared.http.get("/metrics")).text
    families = [each for each in text_string_to_metric_families(text) if not each.name.endswith("_created")]
    exposed = {each.name + "_total" * (each.type == "counter") for each in families}
    assert listed() == {name for name in exposed if name.startswith("edgepipe_")}
