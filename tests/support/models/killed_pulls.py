"""What killed pulls leave in a store."""

from __future__ import annotations

from pathlib import Path


def old_library_files(root: Path) -> Path:
    """Leave what a killed pull of org/tiny by an earlier version left: parts under random names. Return the folder."""
    folder = root / ".pulling-org--tiny" / ".cache" / "huggingface" / "download"
    folder.mkdir(parents=True)
    (folder / "x1.incomplete").write_bytes(bytes(3_000_000))
    (folder / "x2.incomplete").write_bytes(bytes(2_000_000))
    return root / ".pulling-org--tiny"
