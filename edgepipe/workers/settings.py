"""The settings that a daemon gives a child at its start: one JSON line on standard input."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from edgepipe.backend.types import DeviceProfile
from edgepipe.errors import LocalProtocolError
from edgepipe.plain_words import plain

KINDS = ("stage", "engine", "gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSettings:
    """A child's whole configuration; children read no environment."""

    kind: str  # stage | engine | gateway
    child_id: str  # unguessable: by it the daemon recognises its own child
    socket: str  # the daemon's Unix socket
    host: str  # address to listen on
    ports: tuple[int, ...]  # tried in order; (0,): any free one
    http_port: int  # gateways; 0: any free one
    node_id: str
    node_name: str
    cluster_id: str
    address: str  # HOST:PORT of the daemon
    log_level: str
    progress_s: float  # stages and engines: between two reports while work is pending
    keepalive: bool = True  # True: connections send pings
    link: str = ""  # stages and engines: the network to emulate; empty: the real one
    http_host: str = "127.0.0.1"  # gateways: address to listen on besides loopback
    http_names: tuple[str, ...] = ()  # gateways: more host names that clients may use
    http_origins: tuple[str, ...] = ()  # gateways: web origins that may ask, see ``Origins``
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    key_on_loopback: bool = False
    files_dir: str = ""  # gateways: folder of files and batches
    files_limit_bytes: int = 0  # gateways: disk for them
    files_days: int = 30  # gateways: days until a file is deleted
    tier_dir: str = ""  # stages: folder of the files of KV that leaves host memory; empty: none
    backend: str = ""  # stages
    mark: int = -1  # stages: descriptor of the file that holds the step being computed
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 0
    backend_options: dict[str, str] = field(default_factory=dict[str, str])
    device_profile: DeviceProfile | None = None  # an earlier measurement; None: measure the device

    def to_line(self) -> bytes:
        """Encode as one line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> ChildSettings:
        """Decode the line of ``to_line``. Raises LocalProtocolError when a person started the module by hand."""
        try:
            values: dict[str, Any] = json.loads(line)
            for name in ("ports", "http_names", "http_origins", "api_keys"):
                values[name] = tuple(values.get(name, ()))
            if profile := values.get("device_profile"):
                for name in ("block_sizes", "kv_forms"):
                    profile[name] = tuple(profile[name])
                values["device_profile"] = DeviceProfile(**profile)
            return cls(**values)
        except (ValueError, TypeError, KeyError) as exc:
            raise LocalProtocolError(
                "a child process needs its settings as one line of JSON on standard input",
                fact=plain(exc),
                next_step="start a node with 'edgepipe node start'; it starts its children itself",
            ) from exc
