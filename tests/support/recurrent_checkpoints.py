"""Tiny checkpoints with random weights of families with recurrent layers, as ``transformers`` saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig


def save_checkpoint(
    config: PretrainedConfig, folder: Path, tokens: list[int], *, slow: bool = False
) -> npt.NDArray[np.float64]:
    """Save a model with this config. Returns its logits [T, V] of the tokens, in float32.

    slow  states remember tens to hundreds of tokens, as trained ones do; else a few
    """
    torch.manual_seed(0)
    kind: Any = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("A_log"):
                parameter.normal_(std=1.0 / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 0.3)
            elif slow:
                parameter.uniform_(-7.0, -2.0)
        for name, buffer in model.named_buffers():
            if "bias" in name:  # corrections of routers
                buffer.normal_(std=0.3)
    model.save_pretrained(folder)
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].double().numpy()
