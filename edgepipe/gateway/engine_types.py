"""The served models, as the daemon reports them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgepipe.errors import EdgepipeError
from edgepipe.ids import Epoch, PipelineId
from edgepipe.safe_text import one_line
from edgepipe.text.template_defaults import keywords_in
from edgepipe.units import format_duration_s
from edgepipe.wire import nodes
from edgepipe.wire.engines import EngineState

_LONGEST_PAUSE_S = 300.0  # longest pause that an engine may report; another node's clock may be wrong
_MOST_STEPS = 64  # the number is another node's claim


@dataclass(frozen=True, slots=True, kw_only=True)
class RingMachines:
    """The machines that compute a model's answers during one epoch, in the order that a token passes."""

    epoch: int
    stages: tuple[tuple[str, str], ...]  # name of the machine, its layers as people read them

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value."""
        stages = [{"machine": machine, "layers": layers} for machine, layers in self.stages]
        return {"epoch": self.epoch, "stages": stages}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedModel:
    """A model that an engine serves, as this node's daemon reports it."""

    name: str
    pipeline_id: PipelineId
    epoch: Epoch
    state: str  # "starting" | "loading" | "ready" | "recovering" | "waiting" | "failed" | "stopping"
    address: str  # HOST:PORT of the engine
    certificate: bytes = b""  # PEM, of the engine's process; empty without encryption
    context_length: int  # tokens, prompt and output
    model_path: str  # local folder or file with config, tokenizer and template
    manifest_hash: str = ""
    weight_bytes: int = 0  # bytes of all stages together
    on_request: bool = False  # a request loaded the model, and requests set how long it stays
    num_requests: int = 0  # requests at the engine, of all gateways
    num_steps: int = 1  # steps that the ring computes at a time
    message: str = ""
    error: EdgepipeError | None = None
    names: tuple[str, ...] = ()  # further names by which requests may ask for it
    # Defaults for keywords that a request leaves out.
    template_keywords: Mapping[str, Any] = field(default_factory=dict[str, Any])
    # Wall-clock time of the node until which the engine pauses after crashes; 0: it does not pause.
    starts_at_us: int = 0
    ring: RingMachines | None = None  # None while no stage is known
    replica: int = 0  # number among several pipelines of the model, from 1; 0: the only one
    num_waiting: int = 0  # requests of ``num_requests`` that have not begun
    free_tokens: int | None = None  # KV tokens that no sequence holds; None: not known
    share: float = 0.0  # planned share of several pipelines' conversations; 0: an equal one
    num_engines: int = 1  # engines that answer for the model

    @property
    def ready(self) -> bool:
        """Whether requests may be sent; while the engine recovers, they wait there."""
        return self.state in ("ready", "recovering") and bool(self.address)

    def refusal(self, *, wall_s: float) -> EdgepipeError | None:
        """Return why the engine takes no request, with the time of its next start; None without a known reason."""
        if self.error is None or not self.starts_at_us:
            return self.error
        left_s = min(max(self.starts_at_us / 1e6 - wall_s, 1.0), _LONGEST_PAUSE_S)
        error = type(self.error)(
            self.error.what,
            fact=f"{self.error.fact}; it starts again in {format_duration_s(left_s)}",
            next_step="try again then",
            node=self.error.node,
        )
        error.retry_after_s = left_s
        return error


def served_models(view: nodes.ClusterView) -> list[RoutedModel]:
    """Return the models of a cluster view."""
    return [_served(entry) for entry in view.served]


def _served(entry: nodes.ServedModel) -> RoutedModel:
    engine = entry.engine
    return RoutedModel(
        name=engine.model,
        pipeline_id=engine.pipeline_id,
        epoch=engine.epoch,
        state=engine.state,
        address=engine.address,
        certificate=engine.certificate,
        context_length=engine.context_length,
        model_path=entry.model_path,
        manifest_hash=engine.manifest_hash,
        weight_bytes=sum(stage.weight_bytes for stage in engine.stages),
        on_request=entry.on_request,
        num_requests=engine.running + engine.waiting,
        num_steps=min(max(1, engine.micro_batches, len(engine.stages)), _MOST_STEPS),
        message=engine.message,
        error=engine.error,
        names=engine.names,
        starts_at_us=engine.starts_at_us,
        template_keywords=keywords_in(engine.template_keywords),
        ring=_ring(engine),
        replica=engine.replica,
        num_waiting=engine.waiting,
        free_tokens=engine.free_blocks * engine.block_size if engine.num_blocks else None,
        share=engine.replica_share,
    )


def _ring(engine: EngineState) -> RingMachines | None:
    stages = tuple(
        (one_line(stage.node_name, most_chars=64), ",".join(part.layers.shown for part in stage.slices))
        for stage in engine.stages[:_MOST_STEPS]
    )
    return RingMachines(epoch=engine.epoch.counter, stages=stages) if stages else None
