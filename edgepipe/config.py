"""Settings: the only module that reads the environment.

A setting comes from a flag, else ``EDGEPIPE_<NAME>``, else the TOML file, else its default, and its origin is recorded.
An unknown name is always an error.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import socket
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import platformdirs

from edgepipe.errors import ConfigInvalid
from edgepipe.plain_words import plain
from edgepipe.units import parse_bytes, parse_link

ENV_PREFIX = "EDGEPIPE_"
NODE_PORT, HTTP_PORT = 7117, 8117  # defaults
CHILD_PORTS = 15  # a node's children listen on P+1 .. P+15
PAIRING_OFFSET = CHILD_PORTS + 1  # a node also listens on this port during an invitation
_FILE_VARIABLE = "EDGEPIPE_CONFIG"  # path of the TOML file, so not itself a setting
_GRPC_FORK = "GRPC_ENABLE_FORK_SUPPORT"
_GRPC_VERBOSITY = "GRPC_VERBOSITY"
_GRPC_CIPHERS = "GRPC_SSL_CIPHER_SUITES"
_NO_TLS_1_2 = "ECDHE-RSA-AES256-GCM-SHA384"
_GRPC_EXPERIMENTS = "GRPC_EXPERIMENTS"
_ONE_POLLER = "-event_engine_client,-event_engine_listener"
_ONE_POLLER_UP_TO = (1, 85)  # newest gRPC version known to have these experiments; others would warn about the names
_MLX = {"MLX_MAX_OPS_PER_BUFFER": "100", "MLX_MAX_MB_PER_BUFFER": "256", "MLX_ENABLE_TF32": "0"}
"""MLX reads them once, when it opens the GPU.

MLX sends a GPU its work in command buffers, each of which costs about 20 us. By default one ends with 40 or 50
operations or MB of inputs, so every expert stack and every KV pool ends one. Much larger ones keep more memory, and
macOS may end a prompt's that takes seconds. With TF32, M5 GPUs would round float32 inputs of products to 10 bits: those
of routers and of recurrent layers.
"""
_LOG_LEVELS = ("debug", "info", "warning", "error")
_LOCAL_KEY = ("auto", "yes", "no")
_DTYPES = ("auto", "float32", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings of a node. Field names are the names of flags, variables and TOML keys."""

    name: str = ""  # name of this node; empty: the one that --name gave it last, or the host's
    cluster: str = ""  # name of the cluster that a new node founds; empty: home. Nodes join other clusters by pairing
    backend: str = "auto"  # auto, none, or the name of a backend's entry point
    device: str = "auto"  # the backend's device name, such as cuda:0
    dtype: str = "auto"  # compute dtype of this node's stages
    interface: str = ""  # network interface or address; empty: the one with the route to the network
    port: int = NODE_PORT  # port of the daemon; its children use the next 15; 0: any free ports
    http_port: int = HTTP_PORT  # port of the gateway; 0: any free port
    http_host: str = "127.0.0.1"  # address for HTTP besides loopback; 0.0.0.0: all. Other than loopback needs a key
    http_names: tuple[str, ...] = ()  # host names accepted in HTTP requests, besides the machine's own
    http_origins: tuple[str, ...] = ()  # web origins that may use the API, such as app://obsidian.md; *: all
    api_key: tuple[str, ...] = field(default=(), repr=False)  # keys for HTTP, also required on this computer
    local_key: str = "auto"  # whether HTTP requires a key from this computer's clients; auto: if it has several users
    peers: tuple[str, ...] = ()  # HOST:PORT of nodes that discovery does not find
    discovery: bool = True  # announce and browse by mDNS
    load_on_request: bool = True  # serve a model from a disk of the cluster when an HTTP request asks for it
    listen_s: float = 3.0  # time that commands listen for other nodes, which answer at once unless Wi-Fi sleeps
    data_dir: Path = Path()  # identity, socket, logs
    models_dir: Path = Path()  # model store; empty: DATA_DIR/models
    copies: int = 2  # disks that keep each part of a model served by this node's engines; 1: only disks that need it
    files_limit_bytes: int = 20_000_000_000  # disk for files of batches: requests and answers
    files_days: int = 30  # days until such a file is deleted
    memory_limit_bytes: int = 0  # memory limit of this node's stages; 0: all free memory
    threads: int = 0  # compute threads of a stage; 0: the backend's choice
    backend_options: tuple[str, ...] = ()  # backend-specific settings as KEY=VALUE
    link: str = ""  # network to emulate for data that the node sends, such as 1gbit,0.3ms; empty: no emulation
    log_level: str = "info"  # debug, info, warning or error


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """Settings with their origins."""

    values: Config
    origins: Mapping[str, str] = field(default_factory=dict[str, str])  # "flag" | "env X" | "file P" | "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Deadlines of the control plane. Profiles differ in the worst case of their network."""

    connect_s: float  # time for a TCP connection and its first answer
    beat_interval_s: float = 0.25  # four heartbeats a second: eight chances before the dead limit
    tick_s: float = 0.125  # interval of checks for silence
    refused_s: float = 0.3  # connection refused for this long means that the process ended: a restart takes longer
    dead_min_s: float = 2.0  # no heartbeat for this long means dead, unless the link's gaps require more
    dead_max_s: float = 6.0  # a link with gaps above a third of this cannot carry a pipeline anyway
    state_refresh_s: float = 2.0  # interval of repeating a node's unchanged state
    redial_min_s: float = 0.1  # first wait after a failed dial
    redial_max_s: float = 2.0  # longest wait: a node that returns is seen within it
    forget_s: float = 3600.0  # a node away for this long is no longer listed; its last addresses are dialled on
    redial_away_s: float = 15.0  # longest wait then: a machine may be off for weeks
    child_start_s: float = 60.0  # importing torch and measuring a device takes 2-10 s, more on a busy machine
    child_stop_s: float = 5.0  # a child that does not stop is killed after this
    load_s: float = 60.0  # a loading stage reports every tensor: 1 GB at 40 MB/s takes 25 s
    orphan_s: float = 30.0  # stages without their engine wait this long for another one
    gather_s: float = 10.0  # after its start, a serving node waits this long for the other nodes of its pipelines
    hang_s: float = 5.0  # a child that is silent for this long hangs, unless it announced a longer limit
    transfer_idle_s: float = 20.0  # a transfer without a byte for this long continues with another peer

    @classmethod
    def loopback(cls) -> Timeouts:
        """Return the profile for one machine, where only load delays answers."""
        return cls(connect_s=2.0)

    @classmethod
    def lan(cls) -> Timeouts:
        """Return the profile for cables and a switch: one lost SYN costs 1 s."""
        return cls(connect_s=3.0)

    @classmethod
    def wifi(cls) -> Timeouts:
        """Return the profile for Wi-Fi: bursts of loss and scans of up to 1 s may lose two SYNs (1 s + 2 s)."""
        return cls(connect_s=5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watching:
    """How the processes of a node watch each other. Benches turn it off to measure its cost; no setting leads to it."""

    timeouts: Timeouts | None = None  # None: the profile of the node's network
    hang_check_s: float = 0.25  # interval between two checks for hanging children
    progress_s: float = 0.25  # a child with pending work reports four times a second
    keepalive: bool = True  # gRPC pings on all connections


def default_data_dir() -> Path:
    """Return the default folder of a node's identity."""
    return Path(platformdirs.user_data_dir("edgepipe", appauthor=False))


def default_config_file() -> Path:
    """Return the default path of the TOML file."""
    return Path(platformdirs.user_config_dir("edgepipe", appauthor=False)) / "config.toml"


def kernel_dir() -> Path:
    """Return the folder where backends keep compiled kernels. A backend compiles what it does not find there."""
    return Path(platformdirs.user_cache_dir("edgepipe", appauthor=False)) / "kernels"


def config_file(environ: Mapping[str, str] | None = None) -> Path:
    """Return the path of the TOML file in effect."""
    variables = os.environ if environ is None else environ
    return Path(variables[_FILE_VARIABLE]) if _FILE_VARIABLE in variables else default_config_file()


def load_config(
    flags: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> LoadedConfig:
    """Load settings from flags (None: not given), environment, TOML file and defaults. Raises ConfigInvalid.

    A node keeps the name that its last ``--name`` gave it; a setting has priority over it.
    """
    variables = os.environ if environ is None else environ
    raw: dict[str, tuple[Any, str]] = {}
    raw.update(_from_file(file or config_file(variables), required=file is not None or _FILE_VARIABLE in variables))
    raw.update(_from_environ(variables))
    raw.update({_known(key, "flag"): (value, "flag") for key, value in (flags or {}).items() if value is not None})
    values = {name: _parsed(name, value, origin) for name, (value, origin) in raw.items()}
    origins = {name: raw[name][1] if name in raw else "default" for name in _PARSERS}
    completed = _completed(values)
    if "name" not in raw and (kept := _kept_name(completed.data_dir)):
        completed, origins["name"] = replace(completed, name=kept), f"file {name_file(completed.data_dir)}"
    return LoadedConfig(values=completed, origins=origins)


def name_file(data_dir: Path) -> Path:
    """Return the file with the name that a command gave this node."""
    return data_dir / "name"


def _kept_name(data_dir: Path) -> str:
    try:
        return _label(name_file(data_dir).read_text(encoding="ascii"), "name")
    except (OSError, UnicodeDecodeError, ConfigInvalid):  # missing, or damaged
        return ""


def forget_exported_size() -> None:
    """Use the terminal's own size: a size exported by a shell may be outdated."""
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)


def prepare_environment() -> None:
    """Configure gRPC through the environment, before it is imported.

    - Disable fork handlers: with them, one spawned child in four died of SIGSEGV between fork and exec.
    - Silence the C core: our errors are clearer, and a stranger's broken handshakes would fill the log.
    - Require TLS 1.3: gRPC in Python cannot set a minimum version, only the suites of TLS 1.2. The configured suite
      needs an RSA certificate, and all certificates of edgepipe are ECDSA.
    - Read and write sockets on the thread that waits for completions, instead of a thread pool: messages then take half
      the processor time and two thirds of the latency (docs/experiments.md).
    """
    os.environ[_GRPC_FORK] = "0"
    os.environ[_GRPC_CIPHERS] = _NO_TLS_1_2
    os.environ.setdefault(_GRPC_VERBOSITY, "NONE")
    if tuple(map(int, version("grpcio").split(".")[:2])) <= _ONE_POLLER_UP_TO:
        os.environ.setdefault(_GRPC_EXPERIMENTS, _ONE_POLLER)


def forks_safely() -> bool:
    """Return whether gRPC was told to keep out of forks, see ``prepare_environment``."""
    return os.environ.get(_GRPC_FORK) == "0"


def child_environment(*, environ: Mapping[str, str] | None = None, threads: int) -> dict[str, str]:
    """Return the environment for a child process, without settings, which children get in a message.

    A variable of MLX that the user has set stays.
    """
    source = os.environ if environ is None else environ
    kept = {key: value for key, value in source.items() if not key.startswith(ENV_PREFIX)}
    kept[_GRPC_FORK] = "0"
    kept[_GRPC_CIPHERS] = _NO_TLS_1_2
    if threads:
        kept["OMP_NUM_THREADS"] = str(threads)
    return _MLX | kept


def enter_child_environment(*, threads: int) -> None:
    """Give this process, a fork of its parent, the environment of a child process."""
    environment = child_environment(threads=threads)
    os.environ.clear()
    os.environ.update(environment)


def environment_with(variables: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with these variables set."""
    return {**os.environ, **variables}


def names_hub_settings() -> bool:
    """Return whether the environment has settings of the Hugging Face Hub: a token, or another address.

    Or another folder of models. Other processes, such as the node, do not have them.
    """
    return any(key.startswith("HF_") for key in os.environ) or f"{ENV_PREFIX}MODELS_DIR" in os.environ


def asking_user() -> str:
    """Return the user who ran ``sudo``; empty without ``sudo``."""
    return os.environ.get("SUDO_USER", "")


def _completed(values: dict[str, Any]) -> Config:
    values["name"] = values.get("name") or _host_name()
    values["data_dir"] = values.get("data_dir") or default_data_dir()
    values["models_dir"] = values.get("models_dir") or values["data_dir"] / "models"
    return Config(**values)


def _host_name() -> str:
    """Return the host's short name, reduced to the characters of a node's name."""
    short = socket.gethostname().split(".")[0]
    return re.sub(r"[^A-Za-z0-9_-]", "-", short).strip("-_")[:63] or "node"


def _from_file(path: Path, *, required: bool) -> dict[str, tuple[Any, str]]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        if required:
            raise ConfigInvalid(
                f"the settings file {path} does not exist",
                fact=f"{_FILE_VARIABLE} names it",
                next_step=f"make it, or unset {_FILE_VARIABLE}",
            ) from exc
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise ConfigInvalid(
            f"the settings file {path} cannot be read", fact=plain(exc), next_step="repair it, or move it away"
        ) from exc
    return {_known(key, f"file {path}"): (value, f"file {path}") for key, value in document.items()}


def _from_environ(variables: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    found: dict[str, tuple[Any, str]] = {}
    for variable, value in variables.items():
        if variable.startswith(ENV_PREFIX) and variable != _FILE_VARIABLE:
            found[_known(variable.removeprefix(ENV_PREFIX).lower(), variable)] = (value, f"env {variable}")
    return found


def _known(key: str, origin: str) -> str:
    name = key.replace("-", "_")
    name = {"memory_limit": "memory_limit_bytes", "files_limit": "files_limit_bytes"}.get(name, name)
    if name not in _PARSERS:
        close = difflib.get_close_matches(name, _PARSERS, n=1)
        raise ConfigInvalid(
            f"unknown setting '{key}'" + (f" ({origin})" if origin != "flag" else ""),
            fact=f"settings: {', '.join(sorted(_PARSERS))}",
            next_step=f"did you mean '{close[0]}'?" if close else "remove it",
        )
    return name


def _parsed(name: str, value: object, origin: str) -> object:
    try:
        return _PARSERS[name](value, name)
    except ConfigInvalid as error:
        if origin != "flag":  # the user sees a flag in the command, but not the other origins
            raise error.changed(fact=f"it comes from {_where(origin, name)}") from error
        raise


def _where(origin: str, name: str) -> str:
    """Return the origin for an error: ``env EDGEPIPE_PORT`` or ``'port' in file PATH``."""
    return origin if origin.startswith("env ") else f"'{name}' in {origin}"


def _wrong(name: str, value: object, wanted: str) -> ConfigInvalid:
    return ConfigInvalid(f"{name} cannot be '{value}'", next_step=f"give {wanted}")


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise _wrong(name, value, "a text")
    return value.strip()


def _label(value: Any, name: str) -> str:
    text = _text(value, name)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", text):  # used in mDNS names and plans ("a:0-14,b:15-29")
        raise _wrong(name, value, "1 to 63 letters, digits, dots, dashes or underscores")
    return text


def _one_of(choices: tuple[str, ...]) -> Callable[[Any, str], str]:
    def parse(value: Any, name: str) -> str:
        if value not in choices:
            raise _wrong(name, value, f"one of {', '.join(choices)}")
        return value

    return parse


def _number(lowest: int, highest: int) -> Callable[[Any, str], int]:
    def parse(value: Any, name: str) -> int:
        try:
            number = int(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else -1
        except ValueError:
            number = -1
        if not lowest <= number <= highest:
            raise _wrong(name, value, f"a number from {lowest} to {highest}")
        return number

    return parse


def _seconds(lowest: float, highest: float) -> Callable[[Any, str], float]:
    def parse(value: Any, name: str) -> float:
        try:
            number = float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else -1.0
        except ValueError:
            number = -1.0
        if not lowest <= number <= highest:
            raise _wrong(name, value, f"seconds from {lowest:g} to {highest:g}")
        return number

    return parse


def _flag(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return value
    meaning = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if str(value).lower() not in meaning:
        raise _wrong(name, value, "true or false")
    return meaning[str(value).lower()]


def _path(value: Any, name: str) -> Path:
    if not isinstance(value, (str, Path)) or not str(value):
        raise _wrong(name, value, "a folder")
    return Path(value).expanduser().absolute()


def _bytes(value: Any, name: str) -> int:
    return parse_bytes(str(value))


def _link(value: Any, name: str) -> str:
    text = _text(value, name)
    return text if not text or not parse_link(text).ideal else ""


def _words(value: Any, name: str) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)):
        raise _wrong(name, value, "a list")
    words = tuple(str(part).strip() for part in parts)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return tuple(word for word in words if word)


def _addresses(value: Any, name: str) -> tuple[str, ...]:
    for address in (found := _words(value, name)):
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise _wrong(name, address, "addresses as HOST:PORT, such as 192.168.1.20:7117")
    return found


def _ip_address(value: Any, name: str) -> str:
    try:
        return str(ipaddress.ip_address(_text(value, name)))
    except ValueError:
        raise _wrong(name, value, "an address of this machine such as 192.168.1.20, or 0.0.0.0 for all") from None


def _host_names(value: Any, name: str) -> tuple[str, ...]:
    for word in (found := _words(value, name)):
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", word):
            raise _wrong(name, word, "names of hosts, such as ai.home.example")
    return found


def _origins(value: Any, name: str) -> tuple[str, ...]:
    for word in (found := _words(value, name)):
        if not _ORIGIN.fullmatch(word):
            wanted = "origins such as app://obsidian.md or http://localhost:3000; * for any: http://localhost:*"
            raise _wrong(name, word, wanted)
    return found


_ORIGIN = re.compile(
    r"\*|null|[a-z][a-z0-9+.-]{0,31}://(\*|(\*\.)?[a-z0-9_.-]{0,253}|\[[0-9a-f:]{2,45}\])(:([0-9]{1,5}|\*))?",
    re.IGNORECASE,
)


def _keys(value: Any, name: str) -> tuple[str, ...]:
    for key in (found := _words(value, name)):
        if not re.fullmatch(r"[!-+\--~]{8,256}", key):
            raise ConfigInvalid(
                f"{name} has an invalid key", next_step="give 8 to 256 letters, digits or signs, no spaces"
            )
    return found


def _pairs(value: Any, name: str) -> tuple[str, ...]:
    for pair in (found := _words(value, name)):
        if "=" not in pair:
            raise _wrong(name, pair, "settings as KEY=VALUE")
    return found


_PARSERS: dict[str, Callable[[Any, str], Any]] = {
    "name": _label,
    "cluster": _label,
    "backend": _label,
    "device": _text,
    "dtype": _one_of(_DTYPES),
    "interface": _text,
    "port": _number(0, 65535 - 16),  # the ports of children and pairing are above it
    "http_port": _number(0, 65535),
    "http_host": _ip_address,
    "http_names": _host_names,
    "http_origins": _origins,
    "api_key": _keys,
    "local_key": _one_of(_LOCAL_KEY),
    "peers": _addresses,
    "discovery": _flag,
    "load_on_request": _flag,
    "listen_s": _seconds(0.1, 60.0),
    "data_dir": _path,
    "models_dir": _path,
    "copies": _number(1, 16),
    "files_limit_bytes": _bytes,
    "files_days": _number(1, 3650),
    "memory_limit_bytes": _bytes,
    "threads": _number(0, 1024),
    "backend_options": _pairs,
    "link": _link,
    "log_level": _one_of(_LOG_LEVELS),
}
assert set(_PARSERS) == {entry.name for entry in fields(Config)}
