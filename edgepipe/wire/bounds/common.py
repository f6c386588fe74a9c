"""Bounds of ``common.proto``."""

from __future__ import annotations

from edgepipe.sampling.bounds import Within
from edgepipe.wire.bounds.rules import (
    BLOCK,
    BYTES,
    COUNT,
    EQUAL,
    FEW,
    LAYERS,
    RATE,
    Checked,
    Harmless,
    Most,
    Tables,
)

_SAMPLING = Checked("edgepipe.wire.intake:submission_refusal")

COMMON: Tables = {
    "Epoch": {"counter": COUNT},
    "Hello": {"protocol_version": EQUAL},
    "LayerRange": {"start": LAYERS, "end": LAYERS},
    "Slice": {"index": LAYERS},
    "DeviceProfile": {
        "memory_total_bytes": BYTES,
        "memory_free_bytes": BYTES,
        "bandwidth_bytes_per_s": RATE,
        "flops": Within(0.0, 1e24),
        "block_sizes": Most(64, BLOCK),
        "kv_forms": FEW,
        "ram_total_bytes": BYTES,
        "ram_free_bytes": BYTES,
        "ram_bytes_per_s": RATE,
    },
    "StageSettings": {
        "context_length": COUNT,  # the node compares it with the model, and says what is possible
        "block_size": Within(1, 1 << 16),  # tokens
        "most_slots": COUNT,
    },
    "SamplingParams": dict[str, Checked](
        temperature=_SAMPLING,
        seed=_SAMPLING,
        top_k=_SAMPLING,
        top_p=_SAMPLING,
        min_p=_SAMPLING,
        frequency_penalty=_SAMPLING,
        presence_penalty=_SAMPLING,
        repetition_penalty=_SAMPLING,
        bias_ids=_SAMPLING,
        bias_values=_SAMPLING,
        top_logprobs=_SAMPLING,
        min_tokens=_SAMPLING,
    ),
    "TokenLogprobs": {
        "logprob": Harmless("answers show what is not finite as the lowest number: gateway.logprobs"),
        "top_ids": Checked("edgepipe.gateway.log:RequestLog.append"),
        "top_logprobs": Checked("edgepipe.wire.sampling:logprobs_from_wire"),
    },
}
