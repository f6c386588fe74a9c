"""Settings: the sole reader of the environment.

A setting comes from a flag, else from ``EDGEPIPE_<NAME>``, else from the TOML file, else from its default, and keeps a
note of which it was. An unknown name is an error everywhere.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import socket
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import platformdirs

from edgepipe.errors import ConfigInvalid
from edgepipe.units import parse_bytes, parse_link

ENV_PREFIX = "EDGEPIPE_"
NODE_PORT, HTTP_PORT = 7117, 8117  # unless settings say otherwise
CHILD_PORTS = 15  # a node's children listen on P+1 .. P+15
PAIRING_OFFSET = CHILD_PORTS + 1  # while somebody invites, a node listens there, too
_FILE_VARIABLE = "EDGEPIPE_CONFIG"  # names the TOML file itself, so it is no setting
_GRPC_FORK = "GRPC_ENABLE_FORK_SUPPORT"
_GRPC_VERBOSITY = "GRPC_VERBOSITY"
_GRPC_CIPHERS = "GRPC_SSL_CIPHER_SUITES"
_NO_TLS_1_2 = "ECDHE-RSA-AES256-GCM-SHA384"
_GRPC_EXPERIMENTS = "GRPC_EXPERIMENTS"
_ONE_POLLER = "-event_engine_client,-event_engine_listener"
_ONE_POLLER_UP_TO = (1, 85)  # gRPC's versions that are known to have the choice; others would complain of the names
_LOG_LEVELS = ("debug", "info", "warning", "error")
_LOCAL_KEY = ("auto", "yes", "no")
_DTYPES = ("auto", "float32", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything that a node can be told. Field names are the names of flags, variables and TOML keys."""

    name: str = ""  # of this node; empty: the host's name
    cluster: str = ""  # name of the cluster that a new node founds, home unless given; nodes join others by pairing
    backend: str = "auto"  # auto | none | a backend's entry point
    device: str = "auto"  # the backend's word, such as cuda:0
    dtype: str = "auto"  # compute dtype of this node's stages
    interface: str = ""  # network interface or address; empty: the one that leads to the network
    port: int = NODE_PORT  # of the daemon, children take the 15 above; 0: any free ports
    http_port: int = HTTP_PORT  # of the gateway; 0: any free port
    http_host: str = "127.0.0.1"  # address that HTTP listens on besides loopback; 0.0.0.0: all. Elsewhere needs a key
    http_names: tuple[str, ...] = ()  # names under which HTTP may be asked, besides the machine's own
    api_key: tuple[str, ...] = field(default=(), repr=False)  # that HTTP asks for, on this computer too
    local_key: str = "auto"  # whether HTTP asks this computer's own clients for a key; auto: if it has several users
    peers: tuple[str, ...] = ()  # HOST:PORT of nodes that discovery does not find
    discovery: bool = True  # announce and browse by mDNS
    load_on_request: bool = True  # an HTTP request for a model on some disk of the cluster has it served
    listen_s: float = 3.0  # commands listen so long for other nodes, which answer at once; sleeping Wi-Fi takes longer
    data_dir: Path = Path()  # identity, socket, logs
    models_dir: Path = Path()  # model store; empty: DATA_DIR/models
    copies: int = 2  # disks that keep each part of a model that this node's engines serve; 1: as many as need it
    memory_limit_bytes: int = 0  # most that stages of this node may take; 0: what is free
    threads: int = 0  # compute threads of a stage; 0: the backend's choice
    backend_options: tuple[str, ...] = ()  # KEY=VALUE settings of the backend's own
    link: str = ""  # emulate this network for what the node sends, such as 1gbit,0.3ms; empty: the real one alone
    log_level: str = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """Settings, and where each came from."""

    values: Config
    origins: Mapping[str, str] = field(default_factory=dict[str, str])  # "flag" | "env X" | "file P" | "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Every deadline of the control plane, in one value. Profiles differ in what their network can do at its worst."""

    connect_s: float  # until a TCP connection and its first answer stand
    beat_interval_s: float = 0.25  # four heartbeats a second: eight chances before the dead limit
    tick_s: float = 0.125  # silence is looked at this often
    refused_s: float = 0.3  # connection refused this long means that the process is gone: a restart takes longer
    dead_min_s: float = 2.0  # no heartbeat for this long means dead, unless the link's own gaps ask for more
    dead_max_s: float = 6.0  # a link with worse gaps than a third of this cannot carry a pipeline anyway
    state_refresh_s: float = 2.0  # a node's state is repeated this often though unchanged
    redial_min_s: float = 0.1  # first wait before a failed dial is tried again
    redial_max_s: float = 2.0  # longest wait: a node that comes back is seen within it
    forget_s: float = 3600.0  # a dead node is dialled this long; later it must announce itself again
    child_start_s: float = 60.0  # importing torch and measuring a device takes 2-10 s, on a busy machine more
    child_stop_s: float = 5.0  # a child that was told to stop is killed after this
    load_s: float = 60.0  # a stage that loads tells of every tensor: 1 GB at 40 MB/s takes 25 s
    orphan_s: float = 30.0  # stages whose engine is gone wait for another one so long
    gather_s: float = 10.0  # after its start, a node that shall serve waits so long for the others it did so with
    hang_s: float = 5.0  # a child that tells nothing for this long hangs, unless it announced more
    transfer_idle_s: float = 20.0  # a transfer without a byte for this long goes on with another peer

    @classmethod
    def loopback(cls) -> Timeouts:
        """One machine: only its own load delays answers."""
        return cls(connect_s=2.0)

    @classmethod
    def lan(cls) -> Timeouts:
        """Cables and a switch: one lost SYN costs 1 s."""
        return cls(connect_s=3.0)

    @classmethod
    def wifi(cls) -> Timeouts:
        """Radio: bursts of loss and scans of up to a second, so two lost SYNs must pass (1 s + 2 s)."""
        return cls(connect_s=5.0)


def default_data_dir() -> Path:
    """Where a node keeps its identity when nobody says otherwise."""
    return Path(platformdirs.user_data_dir("edgepipe", appauthor=False))


def default_config_file() -> Path:
    """The TOML file that is read when nobody names another."""
    return Path(platformdirs.user_config_dir("edgepipe", appauthor=False)) / "config.toml"


def config_file(environ: Mapping[str, str] | None = None) -> Path:
    """The TOML file in effect."""
    variables = os.environ if environ is None else environ
    return Path(variables[_FILE_VARIABLE]) if _FILE_VARIABLE in variables else default_config_file()


def load_config(
    flags: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> LoadedConfig:
    """Settings from flags (None: not given), environment, TOML file and defaults. Raises ConfigInvalid."""
    variables = os.environ if environ is None else environ
    raw: dict[str, tuple[Any, str]] = {}
    raw.update(_from_file(file or config_file(variables), required=file is not None or _FILE_VARIABLE in variables))
    raw.update(_from_environ(variables))
    raw.update({_known(key, "flag"): (value, "flag") for key, value in (flags or {}).items() if value is not None})
    values = {name: _parsed(name, value, origin) for name, (value, origin) in raw.items()}
    origins = {name: raw[name][1] if name in raw else "default" for name in _PARSERS}
    return LoadedConfig(values=_completed(values), origins=origins)


def forget_exported_size() -> None:
    """Let the terminal say how wide it is: what a shell exported was true before its window changed."""
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)


def prepare_environment() -> None:
    """Switch gRPC's fork handlers off, before gRPC is imported. With them one spawned child in four died of SIGSEGV
    between fork and exec. And silence its C core: what it writes our errors say better, and a stranger's broken
    handshakes would fill the log.

    And leave TLS 1.3 alone: gRPC has no setting for a lowest version in Python, but one for the suites of TLS 1.2. The
    one that it is given here needs an RSA certificate, and every certificate of edgepipe is ECDSA.

    And have the thread that waits for completions read and write sockets, too, instead of a pool of threads: a message
    that crosses fewer threads takes half the processor time and two thirds of the time (docs/experiments.md)."""
    os.environ[_GRPC_FORK] = "0"
    os.environ[_GRPC_CIPHERS] = _NO_TLS_1_2
    os.environ.setdefault(_GRPC_VERBOSITY, "NONE")
    if tuple(map(int, version("grpcio").split(".")[:2])) <= _ONE_POLLER_UP_TO:
        os.environ.setdefault(_GRPC_EXPERIMENTS, _ONE_POLLER)


def child_environment(*, environ: Mapping[str, str] | None = None, threads: int) -> dict[str, str]:
    """The environment for a child process: this one's without settings (children get theirs as a message)."""
    source = os.environ if environ is None else environ
    kept = {key: value for key, value in source.items() if not key.startswith(ENV_PREFIX)}
    kept[_GRPC_FORK] = "0"
    kept[_GRPC_CIPHERS] = _NO_TLS_1_2
    if threads:
        kept["OMP_NUM_THREADS"] = str(threads)
    return kept


def asking_user(environ: Mapping[str, str] | None = None) -> str:
    """Who typed ``sudo``; empty if nobody did."""
    return (os.environ if environ is None else environ).get("SUDO_USER", "")


def _completed(values: dict[str, Any]) -> Config:
    values["name"] = values.get("name") or _host_name()
    values["data_dir"] = values.get("data_dir") or default_data_dir()
    values["models_dir"] = values.get("models_dir") or values["data_dir"] / "models"
    return Config(**values)


def _host_name() -> str:
    """The host's short name, in the letters that a node's name may have."""
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
            f"the settings file {path} cannot be read", fact=str(exc), next_step="repair it, or move it away"
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
    name = "memory_limit_bytes" if name == "memory_limit" else name
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
        if origin != "flag":  # a flag stands in what was typed; the others must be looked for
            error.fact = f"it comes from {_where(origin, name)}"
        raise


def _where(origin: str, name: str) -> str:
    """``env EDGEPIPE_PORT`` as it stands, ``port in file PATH``."""
    return origin if origin.startswith("env ") else f"'{name}' in {origin}"


def _wrong(name: str, value: object, wanted: str) -> ConfigInvalid:
    return ConfigInvalid(f"{name} cannot be '{value}'", next_step=f"give {wanted}")


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise _wrong(name, value, "a text")
    return value.strip()


def _label(value: Any, name: str) -> str:
    text = _text(value, name)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", text):  # goes into mDNS names and plans ("a:0-14,b:15-29")
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


def _keys(value: Any, name: str) -> tuple[str, ...]:
    for key in (found := _words(value, name)):
        if not re.fullmatch(r"[!-+\--~]{8,256}", key):
            raise ConfigInvalid(
                f"{name} has a key that cannot be used", next_step="give 8 to 256 letters, digits or signs, no spaces"
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
    "port": _number(0, 65535 - 16),  # the children's and the pairing port lie above it
    "http_port": _number(0, 65535),
    "http_host": _ip_address,
    "http_names": _host_names,
    "api_key": _keys,
    "local_key": _one_of(_LOCAL_KEY),
    "peers": _addresses,
    "discovery": _flag,
    "load_on_request": _flag,
    "listen_s": _seconds(0.1, 60.0),
    "data_dir": _path,
    "models_dir": _path,
    "copies": _number(1, 16),
    "memory_limit_bytes": _bytes,
    "threads": _number(0, 1024),
    "backend_options": _pairs,
    "link": _link,
    "log_level": _one_of(_LOG_LEVELS),
}
assert set(_PARSERS) == {entry.name for entry in fields(Config)}
