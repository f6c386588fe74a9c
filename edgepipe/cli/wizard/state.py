"""State of the wizard: its flags and its findings so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from edgepipe.cli.wizard.asking import Asking

if TYPE_CHECKING:
    from edgepipe.config import Config
    from edgepipe.errors import EdgepipeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Flags; None or empty: ask."""

    name: str = ""
    models_dir: bool = False  # True: the flag was given; ``Setup.config`` has its value
    cluster: str = ""
    join: str = ""  # a pairing code
    host: str = ""
    model: str = ""
    skip_model: bool = False
    service: bool | None = None
    invite: bool | None = None


@dataclass(slots=True, kw_only=True)
class Setup:
    """One run of the wizard."""

    asking: Asking
    given: Given
    config: Config
    settings_file: Path
    name: str = ""
    joined: bool = False  # this run of the wizard joined a cluster
    model: str = ""
    failure: EdgepipeError | None = None  # failure of a flag's request; the other steps still run
    commands: list[str] = field(default_factory=list[str])  # equivalent commands of the steps done
    node_pid: int = 0  # the node that the wizard started; 0: it ran already, or the service runs it

    @property
    def data_dir(self) -> Path:
        """Data directory of this machine's node."""
        return self.config.data_dir
