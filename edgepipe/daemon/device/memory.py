"""Limits on the use of a device's memory. The node reserves memory before it loads anything."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from edgepipe.backend import host_memory
from edgepipe.backend.types import DeviceProfile
from edgepipe.errors import NoFeasiblePlacement
from edgepipe.units import format_bytes

_GPU_HEADROOM_BYTES = 1_500_000_000  # workspaces, fragmentation, a desktop with a browser
_HOST_KV_FRACTION = 0.25  # share of free memory: all other programs use the host's memory, too
_GPU_KV_FRACTION = 0.9
_MODEST_KV_BYTES = 512 << 20
_MIN_KV_TOKENS = 512  # fewer cannot hold one ordinary question
_MOST_KILLS, _KILLS_WITHIN_S = 2, 600.0  # kills by the system for lack of memory, after which less is used
PRESSURE_CUT = 0.8  # factor on the usable memory


def uses_host_memory(profile: DeviceProfile) -> bool:
    """Return whether the device uses the machine's own memory, which all programs need (Apple's GPU shares it)."""
    return profile.device == "cpu" or profile.backend == "mlx"


def modest_kv_bytes(*, weight_bytes: int) -> int:
    """Return the default KV size of a stage in host memory: the size of its weights, but some chats' worth."""
    return max(_MODEST_KV_BYTES, weight_bytes)


def headroom_bytes(*, total_bytes: int, on_host: bool) -> int:
    """Return the bytes that always stay free on a device."""
    if not on_host:
        return min(_GPU_HEADROOM_BYTES, total_bytes // 10)
    return host_memory.headroom_bytes(total_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Memory set aside for one stage."""

    weight_bytes: int
    kv_bytes: int
    tier_bytes: int = 0  # host memory for idle KV

    @property
    def num_bytes(self) -> int:
        """All together."""
        return self.weight_bytes + self.kv_bytes + self.tier_bytes


class MemoryPressure:
    """Reduces a device's usable share when the system repeatedly kills stages for lack of memory."""

    def __init__(self) -> None:
        self.share = 1.0  # share of the usable memory that is used
        self._kills: deque[float] = deque(maxlen=_MOST_KILLS)

    def killed(self, now_s: float) -> bool:
        """Count a kill; return whether the share is reduced. ``now_s``: of any monotonic clock."""
        self._kills.append(now_s)
        if len(self._kills) < _MOST_KILLS or now_s - self._kills[0] > _KILLS_WITHIN_S:
            return False
        self._kills.clear()
        self.share *= PRESSURE_CUT
        return True


class DiskLedger:
    """What the disk's free space is promised to: the files of KV of a node's stages, by pipeline."""

    def __init__(self, *, free: Callable[[], int], written: Callable[[], Mapping[str, int]]) -> None:
        """
        free     bytes that are free on the disk now
        written  what the files take already, by holder; a holder that is missing has written nothing
        """
        self._free = free
        self._written = written
        self._held: dict[str, int] = {}

    def promised_beside(self, holder: str) -> int:
        """Return what others than ``holder`` may still write."""
        written = self._written()
        return sum(max(0, size - written.get(other, 0)) for other, size in self._held.items() if other != holder)

    def free_bytes(self, holder: str) -> int:
        """Return the bytes that can be promised to a holder in place of what it has."""
        return max(0, self._free() + self._written().get(holder, 0) - self.promised_beside(holder))

    def hold(self, holder: str, num_bytes: int) -> None:
        """Promise so much to a holder, in place of what it had."""
        self._held[holder] = num_bytes

    def rename(self, holder: str, other: str) -> None:
        """Give a promise to another holder; unknown holders are fine."""
        if holder in self._held:
            self._held[other] = self._held.pop(holder)

    def release(self, holder: str) -> None:
        """Release a promise; unknown holders are fine."""
        self._held.pop(holder, None)


class MemoryLedger:
    """Reservations on one device, by pipeline."""

    def __init__(self, *, node: str, free_bytes: int, total_bytes: int, on_host: bool, limit_bytes: int = 0) -> None:
        self._node = node
        self._on_host = on_host
        usable = free_bytes - headroom_bytes(total_bytes=total_bytes, on_host=on_host)
        self._usable_bytes = max(0, min(usable, limit_bytes) if limit_bytes else usable)
        self._held: dict[str, Reservation] = {}

    @property
    def reserved_bytes(self) -> int:
        """Sum of the reservations."""
        return sum(reservation.num_bytes for reservation in self._held.values())

    @property
    def free_bytes(self) -> int:
        """Bytes that can still be reserved."""
        return max(0, self._usable_bytes - self.reserved_bytes)

    @property
    def held(self) -> Mapping[str, Reservation]:
        """Reservations by pipeline."""
        return self._held

    def reserve(
        self,
        holder: str,
        *,
        weight_bytes: int,
        kv_token_bytes: int,
        kv_tokens: int,
        tier_bytes: int = 0,
        promised_kv_bytes: int = 0,
    ) -> Reservation:
        """Reserve memory for weights and ``kv_tokens`` of KV, or for fewer tokens if a fair share holds no more.

        ``promised_kv_bytes``: KV of what the user was promised, which may take more than that share: a plan has found
        room for it in all free memory, of which the headroom is no part.

        Replaces the reservation of ``holder``. Raises NoFeasiblePlacement with the missing bytes; then nothing changes.
        """
        free = self.free_bytes + (self._held[holder].num_bytes if holder in self._held else 0)
        fixed = weight_bytes + tier_bytes
        least = fixed + min(kv_tokens, _MIN_KV_TOKENS) * kv_token_bytes
        if least > free:
            raise NoFeasiblePlacement(
                f"node {self._node} lacks {format_bytes(least - free)}",
                fact=f"the layers and a small KV cache need {format_bytes(least)}, {format_bytes(free)} are free",
                next_step="close other programs there, start another node, or serve a smaller model",
                node=self._node,
            )
        share = _HOST_KV_FRACTION if self._on_host else _GPU_KV_FRACTION
        most = max(int((free - fixed) * share), least - fixed, min(promised_kv_bytes, free - fixed))
        kv_bytes = min(kv_tokens * kv_token_bytes, most)
        held = Reservation(weight_bytes=weight_bytes, kv_bytes=kv_bytes, tier_bytes=tier_bytes)
        self._held[holder] = held
        return held

    def loaded(self, holder: str, *, weight_bytes: int) -> Reservation:
        """Record the real size of the loaded weights; bytes beyond their reservation reduce the KV's."""
        held = self._held.get(holder, Reservation(weight_bytes=weight_bytes, kv_bytes=0))
        if (more := weight_bytes - held.weight_bytes) > 0:
            held = replace(held, weight_bytes=weight_bytes, kv_bytes=max(0, held.kv_bytes - more))
            self._held[holder] = held
        return held

    def rename(self, holder: str, other: str) -> None:
        """Give a reservation to another holder."""
        self._held[other] = self._held.pop(holder)

    def cut(self, share: float) -> None:
        """Reduce the usable memory to this share; reservations stay."""
        self._usable_bytes = int(self._usable_bytes * share)

    def release(self, holder: str) -> None:
        """Release a reservation; unknown holders are fine."""
        self._held.pop(holder, None)
