"""What a stage does around its backend's loads."""

from __future__ import annotations

from edgepipe_emulated import EmulatedBackend, EmulatedWeights

from edgepipe.backend.types import BackendOptions, DeviceProfile, StageSettings
from tests.support.engine.pipeline import BLOCK_SIZE
from tests.support.engine.pipeline_engine import CONFIG, stages


class Small(EmulatedBackend):
    """A device whose layers leave no memory for a measurement."""

    def profile(self) -> DeviceProfile:
        """Measure, which takes memory."""
        assert self._loaded is None, "the loaded layers fill the device"
        return super().profile()


async def test_a_device_is_measured_while_it_is_empty() -> None:
    async with stages(1, make_backend=lambda _: Small(BackendOptions()), over="memory") as local:
        await local.stages[0].load(  # again
            slices=local.slices,
            open_weights=lambda: EmulatedWeights(CONFIG),
            progress=lambda _: None,
            settings=StageSettings(block_size=BLOCK_SIZE),
        )
