"""The served models, as the daemon reports them."""

from __future__ import annotations

from dataclasses import dataclass

from edgepipe.errors import EdgepipeError
from edgepipe.ids import Epoch, PipelineId
from edgepipe.wire import nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
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
    weight_bytes: int = 0  # of all stages together
    on_request: bool = False  # a request loaded the model, and requests set how long it stays
    num_requests: int = 0  # requests at the engine, of all gateways
    message: str = ""
    error: EdgepipeError | None = None

    @property
    def ready(self) -> bool:
        """Whether requests may be sent; while the engine recovers, they wait there."""
        return self.state in ("ready", "recovering") and bool(self.address)


def served_models(view: nodes.ClusterView) -> list[ServedModel]:
    """Return the models of a cluster view."""
    return [_served(entry) for entry in view.served]


def _served(entry: nodes.ServedModel) -> ServedModel:
    engine = entry.engine
    return ServedModel(
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
        message=engine.message,
        error=engine.error,
    )
