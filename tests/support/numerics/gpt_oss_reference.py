"""transformers' gpt-oss with the weights of ``gpt_oss_files``, widened by its own function."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.support.models.gpt_oss_files import VALUES, Arrays
from tests.support.numerics.harness import Logits


def widened(tensors: Arrays) -> dict[str, torch.Tensor]:
    """The state of transformers' model, experts [E, in, out] as floats."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("_blocks"):
            module = name.removesuffix("_blocks")
            blocks, scales = torch.from_numpy(tensor), torch.from_numpy(tensors[f"{module}_scales"])
            found[module] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        elif not name.endswith("_scales"):
            found[name] = torch.from_numpy(np.array(tensor))
    return found


def reference_logits(tensors: Arrays, tokens: Sequence[int]) -> Logits:
    """Logits [T, V] of one pass in float32."""
    config = GptOssConfig(**VALUES)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    model.load_state_dict(widened(tensors))
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)])).logits[0].numpy()
