"""Checks of this machine for ``edgepipe doctor`` and the setup: program, disk, permissions, network interface."""

from __future__ import annotations

import ctypes.util
import importlib.util
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING

from edgepipe import __version__
from edgepipe.cli.doctor.findings import (
    Finding,
    NetworkFacts,
    descriptor_finding,
    disk_finding,
    note,
    ok,
    rights_finding,
    warning,
)

if TYPE_CHECKING:
    from edgepipe.cluster.probes import MulticastProbe
    from edgepipe.config import Config

_LOOPBACKS = ("127.0.0.1", "::1")
_SLOWER = "packed weights compute with torch's slower operations"
_GAINS = {
    "CUDA": "without them each step widens all weights but those in 4 bits",
    "CPU": "with them one chat is tens of times as fast",  # an 8B layer in Q4_K, 1 thread: 12 ms instead of 1.2 s
}
_NFT_S = 2.0
_NFT_FILE = Path("/etc/nftables.conf")
_NFT_AT_BOOT = Path("/etc/systemd/system/sysinit.target.wants/nftables.service")
_MACOS_WITHOUT_MLX = ("11", "12", "13")  # MLX's packages need macOS 14
_KERNEL_FLAGS = {"avx2", "fma", "f16c"}  # x86 instructions that ``edgepipe_torch.cpu.kernels`` needs


def machine_findings(config: Config) -> Iterator[Finding]:
    """Check the program, backends, disk, permissions and descriptors."""
    yield ok(
        id="machine.version",
        what=f"edgepipe {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}",
    )
    yield backend_finding()
    if (found := kernel_finding()) is not None:
        yield found
    folder = next(path for path in (config.models_dir, *config.models_dir.parents) if path.exists())
    yield disk_finding(str(folder), free_bytes=shutil.disk_usage(folder).free)
    key = config.data_dir / "identity" / "key.pem"
    if key.exists():
        yield rights_finding(str(key), mode=key.stat().st_mode)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if (finding := descriptor_finding(soft=soft)) is not None:
        yield finding


def backend_finding() -> Finding:
    """Check whether a backend is installed that can run a model."""
    return backend_state(
        [name for name in ("torch", "mlx") if importlib.util.find_spec(name)],
        macos=platform.mac_ver()[0] if platform.machine() == "arm64" else "",
        has_gpu=shutil.which("nvidia-smi") is not None,
    )


def backend_state(have: Sequence[str], *, macos: str, has_gpu: bool) -> Finding:
    """Judge the installed backends.

    macos    version on a Mac with Apple silicon; empty: another machine
    has_gpu  an NVIDIA driver is installed
    """
    too_old = macos.partition(".")[0] in _MACOS_WITHOUT_MLX
    if not have:
        extra = "mlx" if macos and not too_old else "torch"
        return warning(
            id="machine.backend",
            what="this machine can chat and show status, but cannot run a model yet",
            fact="neither torch nor mlx is installed",
            remedy=f"edgepipe update --extra {extra}",
        )
    if macos and "mlx" not in have:
        add = "edgepipe update --extra mlx"
        return warning(
            id="machine.backend",
            what="this Mac computes with torch only, several times slower than with MLX",
            fact=f"MLX needs macOS 14 or later; this is macOS {macos}" if too_old else "",
            remedy=f"update macOS, then: {add}" if too_old else add,
        )
    return ok(
        id="machine.backend",
        what=f"backends: {', '.join(have)}",
        fact="an NVIDIA driver is installed" if has_gpu else "",
    )


def kernel_finding() -> Finding | None:
    """Check what the own kernels for packed weights need; None without torch, and on a Mac with MLX.

    Looks without importing torch: for NVRTC where ``edgepipe_torch.cuda.kernels.nvrtc`` does; without an NVIDIA driver
    for llvmlite and the CPU's instructions.
    """
    torch = importlib.util.find_spec("torch")
    if torch is None or (platform.system() == "Darwin" and importlib.util.find_spec("mlx") is not None):
        return None
    if shutil.which("nvidia-smi") is not None:
        remedy = "pip install nvidia-cuda-nvrtc (CUDA 13) or nvidia-cuda-nvrtc-cu12 (CUDA 12)"
        return _compiler_finding("CUDA", "NVRTC", remedy, found=_has_nvrtc(torch))
    flags = _cpu_flags()
    if flags and not flags >= _KERNEL_FLAGS:
        return note(id="machine.kernels", what=_SLOWER, fact="this CPU has no AVX2, FMA and F16C")
    found = importlib.util.find_spec("llvmlite") is not None
    return _compiler_finding("CPU", "llvmlite", "edgepipe update --extra torch", found=found)


def _compiler_finding(kernels: str, compiler: str, remedy: str, *, found: bool) -> Finding:
    if found:
        what = f"packed weights compute with edgepipe's {kernels} kernels"
        return ok(id="machine.kernels", what=what)
    fact = f"{compiler}, which compiles the {kernels} kernels, was not found; {_GAINS[kernels]}"
    return warning(id="machine.kernels", what=_SLOWER, fact=fact, remedy=remedy)


def _has_nvrtc(torch: ModuleSpec) -> bool:
    nvidia = importlib.util.find_spec("nvidia")
    roots = [Path(root) for spec in (torch, nvidia) if spec for root in spec.submodule_search_locations or ()]
    names = ("lib/nvrtc64_*.dll", "*/bin/**/nvrtc64_*.dll", "*/lib/libnvrtc.so.*")
    return bool(ctypes.util.find_library("nvrtc")) or any(any(root.glob(name)) for root in roots for name in names)


def network_facts(config: Config) -> NetworkFacts:
    """Read this machine's network facts from its operating system."""
    from edgepipe.cluster.interfaces import interfaces, is_wireless, lan_interfaces, link_locals6, routed_address

    available = interfaces()
    usable = lan_interfaces(available, routed=routed_address())
    named = [interface for interface in usable if config.interface in (interface.name, interface.address)]
    chosen = next(iter([*named, *usable]), None)
    others = {interface.name for interface in available if interface.address not in _LOOPBACKS}
    ignored = tuple(sorted(others - {interface.name for interface in usable}))
    name = chosen.name if chosen else ""
    release = platform.release().lower()
    return NetworkFacts(
        interface=name,
        address=chosen.address if chosen else "",
        wireless=bool(chosen) and is_wireless(chosen.address, available),
        speed_bits_per_s=max(0, _number(Path(f"/sys/class/net/{name}/speed"))) * 1e6 if name else 0,
        mtu_bytes=max(0, _number(Path(f"/sys/class/net/{name}/mtu"))) if name else 0,
        ignored=ignored,
        link_local="" if chosen else next(iter(link_locals6()), ""),
        live=tuple(f"{interface.name} {interface.address}" for interface in usable if interface.carrier),
        dead=tuple(f"{interface.name} {interface.address}" for interface in usable if not interface.carrier),
        wsl="microsoft" in release and bool(chosen) and chosen.address.startswith("172."),
        mac=sys.platform == "darwin",
        firewall=_firewall(),
    )


async def check_multicast(facts: NetworkFacts, *, listen_s: float) -> MulticastProbe:
    """Probe whether other machines answer multicast questions over IPv4."""
    from edgepipe.cluster.interfaces import own_addresses
    from edgepipe.cluster.probes import probe_multicast

    return await probe_multicast(facts.address, own=own_addresses(), listen_s=listen_s)


def _firewall() -> str:
    """Return the active firewall, as far as an ordinary user can see."""
    try:
        if "ENABLED=yes" in Path("/etc/ufw/ufw.conf").read_text(encoding="utf-8"):
            return "ufw"
    except OSError:
        pass
    if Path("/run/firewalld").exists():
        return "firewalld"
    return "nftables" if nft_drops(_nft_rules()) else ""


def nft_drops(rules: str) -> bool:
    """Return whether rules of nftables drop or reject packets for this machine, other than invalid ones."""
    inside = False
    for line in map(str.strip, rules.splitlines()):
        if line.startswith(("chain ", "}")):
            inside = False
        inside = inside or "hook input" in line
        words = line.replace(";", " ").split()
        if inside and ("drop" in words or "reject" in words) and "invalid" not in words:
            return True
    return False


def _nft_rules() -> str:
    """Return the active rules of nftables, which root alone may read; else those that are loaded at boot."""
    nft = shutil.which("nft") or shutil.which("nft", path="/usr/sbin:/sbin")
    if nft is None:
        return ""
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run([nft, "list", "ruleset"], capture_output=True, text=True, timeout=_NFT_S, check=False)
        if done.returncode == 0:
            return done.stdout
    with suppress(OSError, UnicodeDecodeError):
        if _NFT_AT_BOOT.exists():
            return _NFT_FILE.read_text(encoding="utf-8")
    return ""


def _cpu_flags() -> set[str]:
    """Return an x86 CPU's instruction sets; empty where the system does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set[str]())


def _number(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0
