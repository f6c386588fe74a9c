"""Files as a node leaves them behind, without running one."""

from __future__ import annotations

from pathlib import Path


def make_node(data_dir: Path) -> None:
    """Make a data directory with an identity and a log."""
    (data_dir / "identity").mkdir(parents=True)
    (data_dir / "identity" / "key.pem").write_text("key")
    (data_dir / "open.html").write_text("the page")
    (data_dir / "incarnation").write_text("1")
    (data_dir / "node.log").write_text("ready")
    (data_dir / "node.log.1").write_text("ready")
