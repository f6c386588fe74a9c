"""Values of the engines' reports on requests, and of the daemon's reports on engines."""

from __future__ import annotations

from dataclasses import dataclass

from edgepipe.errors import EdgepipeError
from edgepipe.ids import Epoch, PipelineId, RequestId
from edgepipe.sampling import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensArrived:
    """Tokens of one choice from output position ``position`` on."""

    request_id: RequestId
    attempt: int
    choice: int
    position: int
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per id if the request asked for them


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScored:
    """Log-probabilities of the prompt's tokens from the absolute ``position`` on."""

    request_id: RequestId
    attempt: int
    choice: int
    position: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRead:
    """Number of computed prompt tokens. A late or lost report has no effect."""

    request_id: RequestId
    attempt: int
    choice: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceEnded:
    """End of a choice; each choice has exactly one."""

    request_id: RequestId
    attempt: int
    choice: int
    reason: str  # "stop" | "length" | "cancelled" | "error"
    cached_prompt_tokens: int = 0
    error: EdgepipeError | None = None


EngineReport = TokensArrived | PromptScored | PromptRead | ChoiceEnded


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
