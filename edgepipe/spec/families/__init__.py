"""The supported families, one module each: from ``config.json`` and GGUF metadata to a decoder's parts."""

from __future__ import annotations

from edgepipe.spec.families.cohere2 import COHERE2
from edgepipe.spec.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from edgepipe.spec.families.gemma3 import GEMMA3, GEMMA3_VISION
from edgepipe.spec.families.gemma4 import GEMMA4, GEMMA4_VISION
from edgepipe.spec.families.glm4_moe import GLM4_MOE
from edgepipe.spec.families.glm4_moe_lite import GLM4_MOE_LITE
from edgepipe.spec.families.gpt_oss import GPT_OSS
from edgepipe.spec.families.granite import GRANITE
from edgepipe.spec.families.granite_hybrid import GRANITE_HYBRID
from edgepipe.spec.families.lfm2 import LFM2, LFM2_MOE
from edgepipe.spec.families.llama import LLAMA, QWEN2, QWEN3
from edgepipe.spec.families.minimax_m2 import MINIMAX_M2
from edgepipe.spec.families.mistral import MINISTRAL3, MISTRAL, MISTRAL3
from edgepipe.spec.families.mixtral import MIXTRAL
from edgepipe.spec.families.nemotron_h import NEMOTRON_H, NEMOTRON_H_MOE
from edgepipe.spec.families.olmo import OLMO2, OLMO3
from edgepipe.spec.families.phi3 import PHI3
from edgepipe.spec.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_5_MOE_VISION, QWEN3_5_VISION
from edgepipe.spec.families.qwen3_moe import QWEN3_MOE
from edgepipe.spec.families.qwen3_next import QWEN3_NEXT
from edgepipe.spec.families.reading import Family

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    MISTRAL,
    MISTRAL3,
    MINISTRAL3,
    QWEN2,
    QWEN3,
    GEMMA3,
    GEMMA3_VISION,
    GEMMA4,
    GEMMA4_VISION,
    PHI3,
    GRANITE,
    OLMO2,
    OLMO3,
    COHERE2,
    QWEN3_MOE,
    MIXTRAL,
    GPT_OSS,
    GLM4_MOE,
    GLM4_MOE_LITE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    MINIMAX_M2,
    QWEN3_NEXT,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_5_VISION,
    QWEN3_5_MOE_VISION,
    NEMOTRON_H,
    NEMOTRON_H_MOE,
    GRANITE_HYBRID,
    LFM2,
    LFM2_MOE,
)


def hf_family(hf_class: str) -> Family | None:
    """Return the family of a class in ``architectures``; None if it is not supported."""
    return next((family for family in FAMILIES if family.hf_class == hf_class), None)


def gguf_family(arch: str, *, experts: bool) -> Family | None:
    """Return the family of a ``general.architecture``; None if it is not supported.

    Some architectures stand for several families: Mixtral is a llama with experts.
    """
    fitting = (family for family in FAMILIES if family.from_gguf is not None and family.gguf == arch)
    return next((family for family in fitting if family.with_experts in (experts, None)), None)
