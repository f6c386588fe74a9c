"""What a gateway and an engine say to each other, as values."""

from __future__ import annotations

from dataclasses import dataclass

from edgepipe.errors import EdgepipeError
from edgepipe.ids import PipelineId, RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One prompt with its parameters; kept whole, so that it can be submitted again."""

    request_id: RequestId
    prompt: tuple[int, ...]
    num_choices: int
    max_tokens: int  # output tokens per choice; prompt and output fit into the context
    temperature: float
    seed: int  # 0 <= seed < 2**64
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensArrived:
    """Tokens of one choice from output position ``position`` on."""

    request_id: RequestId
    choice: int
    position: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceEnded:
    """The one ending of a choice."""

    request_id: RequestId
    choice: int
    reason: str  # "stop" | "length" | "cancelled" | "error"
    cached_prompt_tokens: int = 0
    error: EdgepipeError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that some engine serves, as this node's daemon tells it."""

    name: str
    pipeline_id: PipelineId
    engine_id: str
    state: str  # "starting" | "loading" | "ready" | "failed" | "stopping"
    address: str  # HOST:PORT of the engine
    context_length: int  # tokens, prompt and output
    model_path: str  # local folder or file with config, tokenizer and template
    message: str = ""
    error: EdgepipeError | None = None

    @property
    def ready(self) -> bool:
        """Whether requests may be sent."""
        return self.state == "ready" and bool(self.address)
