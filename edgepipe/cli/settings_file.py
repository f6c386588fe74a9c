"""Changes single settings in the settings file; comments and order stay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from edgepipe.errors import ConfigInvalid
from edgepipe.plain_words import plain


def write_settings(path: Path, changes: Mapping[str, str | int | float | bool | list[str]]) -> None:
    """Set top-level keys. Raises ConfigInvalid if the file is no valid TOML or cannot be written."""
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    try:
        document = tomlkit.parse(path.read_text(encoding="utf-8")) if path.exists() else tomlkit.document()
        before = tomlkit.dumps(document)
        for key, value in changes.items():
            document[key] = value
        if tomlkit.dumps(document) == before:
            return
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = path.with_name(path.name + ".part")
        part.touch(mode=0o600)  # the file may hold an API key
        part.write_text(tomlkit.dumps(document), encoding="utf-8")
        part.replace(path)
    except (OSError, TOMLKitError) as exc:
        raise ConfigInvalid(
            f"the settings file {path} cannot be changed", fact=plain(exc), next_step="repair it, or move it away"
        ) from exc
