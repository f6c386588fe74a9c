"""Write a model folder for the emulated backend: a shape, a byte-level tokenizer, a chat template, no weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from edgepipe.spec.config import EMULATED_KEY, SHAPE_KEY
from edgepipe.spec.config_json import config_to_json
from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.layer_spec import Attention, Dense, LayerSpec, Rope
from edgepipe.weights.weights import MIX_KEY

NUM_BYTE_TOKENS = 256
SPECIAL_TOKENS = ("<|bos|>", "<|im_start|>", "<|im_end|>")  # ids 256, 257, 258
BOS_TOKEN_ID = NUM_BYTE_TOKENS
EOS_TOKEN_ID = NUM_BYTE_TOKENS + 2
SMALLEST_VOCAB = NUM_BYTE_TOKENS + len(SPECIAL_TOKENS)

_NO_ATTENTION = Attention(num_heads=1, num_kv_heads=1, head_dim=2, rope=None)  # stands for that of a model without any
_NO_FEED_FORWARD = LayerSpec(dense=Dense(inner=1))

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model_folder(folder: Path, config: ModelConfig, *, mix: str = "") -> None:
    """Write ``config.json``, ``tokenizer.json`` and ``tokenizer_config.json`` into ``folder`` (made if missing).

    The vocabulary must hold at least the bytes and the special tokens; higher ids are artificial words. ``mix``: types
    of the imagined weights (``edgepipe.weights.mixes``); empty: bf16.
    """
    if config.vocab_size < SMALLEST_VOCAB:
        raise ValueError(f"the emulated tokenizer needs a vocabulary of {SMALLEST_VOCAB} or more")
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config_json(config) | ({MIX_KEY: mix} if mix else {}))
    _write_json(folder / "tokenizer_config.json", tokenizer_config_json(config))
    byte_level_tokenizer(config.vocab_size).save(str(folder / "tokenizer.json"))


def config_json(config: ModelConfig) -> dict[str, Any]:
    """Return the config in Hugging Face's format, with the marker of an emulated model.

    Layers without attention or feed-forward part are described in edgepipe's own form besides.
    """
    attention = next((spec.attention for spec in config.layers if spec.attention is not None), _NO_ATTENTION)
    rope = attention.rope
    values = {
        EMULATED_KEY: True,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm.eps,
        "rope_theta": rope.theta if rope is not None else Rope().theta,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": BOS_TOKEN_ID,
        "eos_token_id": EOS_TOKEN_ID,
        "torch_dtype": "bfloat16",
    }
    feeding = next((spec for spec in config.layers if spec.feeds), _NO_FEED_FORWARD)
    if all(spec.attention is not None and spec.feeds for spec in config.layers):
        return values | _feed_forward(feeding)
    own = replace(config, eos_token_ids=(EOS_TOKEN_ID,), bos_token_id=BOS_TOKEN_ID)
    return values | _feed_forward(feeding) | {SHAPE_KEY: config_to_json(own)}


def _feed_forward(spec: LayerSpec) -> dict[str, Any]:
    """Return the class whose layers have the spec's feed-forward part, and its sizes."""
    experts = spec.experts
    if experts is None:
        assert spec.dense is not None  # a layer that feeds has one of them
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "intermediate_size": spec.dense.inner,
        }
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": experts.count,
        "num_experts_per_tok": experts.used,
        "moe_intermediate_size": experts.inner,
        "norm_topk_prob": experts.router.normalised,
    }


def tokenizer_config_json(config: ModelConfig) -> dict[str, Any]:
    """Return the tokenizer's special tokens and the chat template."""
    return {
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[2],
        "add_bos_token": False,
        "model_max_length": config.context_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
    }


def byte_level_tokenizer(vocab_size: int = SMALLEST_VOCAB) -> Tokenizer:
    """Build a tokenizer: ids 0-255 are bytes, 256-258 special tokens; higher ids decode to `` w259`` and so on."""
    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    vocab |= {f"{_space()}w{token}": token for token in range(SMALLEST_VOCAB, vocab_size)}
    vocab |= {token: NUM_BYTE_TOKENS + i for i, token in enumerate(SPECIAL_TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    cast("Any", tokenizer).add_special_tokens(special)  # its stub leaves the list's type open
    return tokenizer


def _space() -> str:
    """Return the character for a space in a byte-level vocabulary."""
    return _byte_characters()[ord(" ")]


def _byte_characters() -> list[str]:
    """Return the printable character for each byte in byte-level vocabularies (GPT-2's table).

    Printable Latin-1 bytes map to themselves, the others in ascending order to U+0100, U+0101, ...
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
