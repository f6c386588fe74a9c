"""Times of one layer on this node's device: kept from an earlier measurement, else measured by the spare."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from edgepipe.daemon.device.layer_profiles import LayerProfiles, profile_key
from edgepipe.daemon.device.spare import SpareStage
from edgepipe.daemon.machine.machine_load import BUSY_SHARE, others_share, processor_times
from edgepipe.daemon.offers import ChildSetup
from edgepipe.daemon.processes.children import Child
from edgepipe.errors import BackendUnavailable, SendTimeout
from edgepipe.planner.layer_profile import LayerProfile
from edgepipe.wire.children import ProfileLayerRequest

_PROFILE_S = 30.0  # time to make up a large layer, copy it to the device and run it
_SAME_S = 60.0  # longest time from a plan to serving with it
_SPARE_S = 15.0  # time for a new process after a stage has ended: import the backend, measure the device


@dataclass(kw_only=True, eq=False)
class LayerMeasuring:
    """Measures one shape at a time."""

    node_name: str
    profiles: LayerProfiles
    spare: SpareStage
    setup: ChildSetup
    device_state: Callable[[], str]  # returns the word for the device's state

    def __post_init__(self) -> None:
        self._turn = asyncio.Lock()

    async def measure(self, request: ProfileLayerRequest) -> LayerProfile:
        """Return a layer's times: known ones, or measured now.

        ``again_if_busy`` measures times again that were measured while the machine was busy, but not within a minute:
        a plan that a person has just seen has the same figures as what is served then. ``fresh`` measures all again. Of
        two busy measurements the shorter counts, since other programs only make steps longer. Measuring needs a device
        that holds nothing: while it serves, return the known times. Raises BackendUnavailable if none are known, or if
        the shape cannot be measured.
        """
        key = self._key(request)
        known = self.profiles.get(key) if key else None
        settles = request.again_if_busy and known is not None and known.busy and _age_s(known) > _SAME_S
        again = request.fresh or settles
        if known is not None and (request.known_only or not again):
            return known
        if request.known_only:
            raise BackendUnavailable(f"node {self.node_name} has not measured this shape")
        async with self._turn:
            spare = await self.spare.alone(_SPARE_S)
            if spare is None and known is not None:
                return known
            key = self._key(request)  # the first spare has made the device known
            before = processor_times(spare.pid) if spare is not None else None
            found = await self._ask(spare, request, key)
            if spare is not None and before is not None:
                found = replace(found, busy=others_share(before, processor_times(spare.pid)) > BUSY_SHARE)
        if not found.decode:
            raise BackendUnavailable(f"node {self.node_name} cannot hold a layer of this shape")
        found = replace(found, measured_ms=round(time.time() * 1e3))
        if found.busy and known is not None and known.busy and _step_s(known) < _step_s(found):
            found = known
        self.profiles.keep(key, found)
        return found

    async def _ask(self, spare: Child | None, request: ProfileLayerRequest, key: str) -> LayerProfile:
        if spare is None or not key:  # the steps of a stage would distort the times
            raise BackendUnavailable(
                f"node {self.node_name} cannot measure now", fact=f"its device is {self.device_state()}"
            )
        answer: asyncio.Future[LayerProfile] = asyncio.get_running_loop().create_future()
        spare.on_profiled = lambda profile: None if answer.done() else answer.set_result(profile)
        spare.send(request)
        return await self._answered(answer, spare)

    async def _answered(self, answer: asyncio.Future[LayerProfile], spare: Child) -> LayerProfile:
        """Wait for the spare's answer. Raises the reason of its end, or SendTimeout if it is silent."""
        gone = asyncio.ensure_future(spare.exited.wait())
        try:
            await asyncio.wait({answer, gone}, timeout=_PROFILE_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            spare.on_profiled = lambda _profile: None
        if answer.done():
            return answer.result()
        if spare.exited.is_set():
            raise spare.error().on_node(self.node_name)
        raise SendTimeout(
            "the device makes no progress with measuring", fact=f"waited {_PROFILE_S:.0f} s", node=self.node_name
        )

    def _key(self, request: ProfileLayerRequest) -> str:
        """Return a key of all that a layer's times depend on; empty while the device is unknown."""
        profile = self.spare.profile
        if profile is None or request.settings.dtype_on(profile.compute_dtype) != profile.compute_dtype:
            return ""
        node = self.setup.child_settings("stage")
        return profile_key(
            profile.backend,
            profile.device,
            profile.name,
            replace(request.settings, dtype=profile.compute_dtype),
            node.threads,
            node.backend_options,
            model_config=request.model_config,
            model_weights=request.model_weights,
        )


def _age_s(profile: LayerProfile) -> float:
    """Return the seconds since a measurement; infinite for one in the future, after the clock was set."""
    age_s = time.time() - profile.measured_ms / 1e3
    return max(0.0, age_s) if age_s > -1.0 else float("inf")  # the time is kept in whole milliseconds


def _step_s(profile: LayerProfile) -> float:
    """Return the seconds of one layer for one sequence."""
    return profile.base_s + min(profile.decode, key=lambda point: point.size).seconds
