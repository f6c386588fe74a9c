"""mlx-lm's decoder layers, without importing mlx-lm itself.

``import mlx_lm`` also imports transformers, and torch if installed: 2 s and 230 MB that a stage does not need. The
definitions need neither, so they are imported through a private package for the folder ``mlx_lm/models`` (8 ms, 1 MB).
Since its modules are private, they can use our attention function without changing mlx-lm for other code.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from edgepipe.errors import ArchitectureUnsupported, BackendUnavailable
from edgepipe.model.facts import ModelConfig
from edgepipe_mlx.attention import attend
from edgepipe_mlx.rope import make_rope

_PACKAGE = "edgepipe_mlx_definitions"
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


def models_folder() -> Path:
    """Return the folder of mlx-lm's definitions. Raises BackendUnavailable if mlx-lm is not installed."""
    spec = importlib.util.find_spec("mlx_lm")
    if spec is None or not spec.submodule_search_locations:
        raise BackendUnavailable(
            "the mlx backend lacks mlx-lm",
            fact="it uses the model definitions of mlx-lm",
            next_step="pip install 'edgepipe[mlx]'",
        )
    return Path(spec.submodule_search_locations[0]) / "models"


def definition(name: str) -> ModuleType:
    """Import mlx-lm's module ``name`` ("llama", "qwen3") as a private copy whose layers call our attention."""
    if _PACKAGE not in sys.modules:
        package = ModuleType(_PACKAGE, "Private package for mlx-lm's model definitions.")
        package.__path__ = [str(models_folder())]
        sys.modules[_PACKAGE] = package
    module = importlib.import_module(f"{_PACKAGE}.{name}")
    setattr(module, "scaled_dot_product_attention", attend)  # noqa: B010 - a module's attribute, unknown to type checkers
    return module


def check_architecture(config: ModelConfig) -> None:
    """Check the model's family. Raises ArchitectureUnsupported."""
    if config.architecture not in ARCHITECTURES:
        raise ArchitectureUnsupported(
            f"the mlx backend does not compute the architecture '{config.architecture}'",
            fact=f"it computes {', '.join(ARCHITECTURES)}",
            next_step="serve the model on nodes with another backend",
        )


def build_block(config: ModelConfig) -> nn.Module:
    """Build one decoder layer with lazy placeholder weights, which allocate no memory before they are replaced.

    In mlx-lm, Mistral equals Llama, and Qwen2 is Llama with biases on q, k and v (and a fixed head size). So two
    definitions cover all families.
    """
    module = definition("qwen3" if config.qk_norm else "llama")
    block: Any = module.TransformerBlock(module.ModelArgs.from_dict(_arguments(config)))
    attention, mlp = block.self_attn, block.mlp
    for name, wanted in (
        ("q_proj", config.qkv_bias),
        ("k_proj", config.qkv_bias),
        ("v_proj", config.qkv_bias),
        ("o_proj", config.output_bias),
    ):
        _set_bias(attention[name], wanted)
    for name in ("gate_proj", "up_proj", "down_proj"):
        _set_bias(mlp[name], config.mlp_bias)
    attention.rope = make_rope(config)
    return block


def _arguments(config: ModelConfig) -> dict[str, Any]:
    """Return arguments in the names of ``config.json``. Rope and biases are plain, since they are replaced later."""
    return {
        "model_type": config.architecture,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tied_embeddings,
    }


def _set_bias(linear: nn.Linear, wanted: bool) -> None:
    """Add a placeholder bias to the projection, or remove it. ``nn.Linear`` adds a bias exactly if it has one."""
    if wanted:
        linear.bias = mx.zeros((linear.weight.shape[0],))
    else:
        linear.pop("bias", None)
