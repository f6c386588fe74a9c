"""Check file names from outside: they must not leave their folder."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from edgepipe.errors import ModelInvalid

MAX_NAME_CHARS = 255


def check_member_name(name: str, *, where: str) -> str:
    """Return ``name`` if it is a plain relative POSIX path. Raises ModelInvalid; ``where``: origin of the name."""
    parts = PurePosixPath(name).parts
    plain = (
        0 < len(name) <= MAX_NAME_CHARS
        and name.isprintable()
        and "\\" not in name
        and ":" not in name
        and not name.startswith(("/", "~"))
        and "/".join(parts) == name
        and all(part not in ("..", ".") for part in parts)
    )
    if not plain:
        raise ModelInvalid(
            f"{where} names a file outside of the model's folder",
            fact=f"the name is {name[:80]!r}",
            next_step="do not use this model, or repair the name",
        )
    return name


def member_path(folder: Path, name: str, *, where: str) -> Path:
    """Return the existing file ``name`` in ``folder``, with links resolved inside it. Raises ModelInvalid."""
    check_member_name(name, where=where)
    path = folder / name
    try:
        resolved = path.resolve(strict=True)
    except (OSError, RuntimeError) as exc:
        raise ModelInvalid(f"'{name}' is missing", fact=f"{where} names it, {folder} has no such file") from exc
    if not any(resolved.is_relative_to(root) for root in _roots(folder)):
        raise ModelInvalid(
            f"'{name}' is a link that leaves the model's folder",
            fact=f"it leads to {resolved}",
            next_step="copy the file itself into the folder",
        )
    if not resolved.is_file():
        raise ModelInvalid(f"'{name}' is not a file", fact=f"{where} names it")
    return resolved


def _roots(folder: Path) -> list[Path]:
    """Return the folder, and for a snapshot of the Hub's cache also its blobs, the targets of its links."""
    resolved = folder.resolve()
    blobs = [resolved.parent.parent / "blobs"] if resolved.parent.name == "snapshots" else []
    return [resolved, *blobs]
