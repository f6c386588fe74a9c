"""The torch backend against ``transformers`` with the same weights on the same device, in turns in one process.

float32 on the CPU, bf16 on a GPU. As a program it takes the model's file or folder.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from edgepipe_torch import TorchBackend
from figures import Row, at_least, print_rows
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from edgepipe.backend.types import BackendOptions, BlockRun, Step, StepRow
from edgepipe.ids import SequenceId, StepId
from edgepipe.spec.facts import LayerRange, ModelConfig, make_slices
from edgepipe.spec.tensors import WeightSource
from edgepipe.weights.dequantise import as_float32
from edgepipe.weights.weights import open_weights
from tests.support.models.specs import first_attention, first_dense, first_rope

THREADS = 2
ROUNDS = 3
PROMPT_TOKENS = 32
NEW_TOKENS = 24
TOKENS_PER_SEQUENCE = 528  # room for the 512-token prompt


def backend_rows(weights: WeightSource, *, device: str = "cpu", threads: int = THREADS) -> list[Row]:
    """Decode of one and of sixteen sequences, and prefill of 512 tokens."""
    ours, theirs = Ours(weights, device=device, threads=threads), Transformers(weights, device=device)
    where = f"torch on {device}"
    return [
        _compare(f"decode, 1 sequence, {where}", NEW_TOKENS, ours.decode(1), theirs.decode(1), 1.5),
        _compare(f"decode, 16 sequences, {where}", 16 * NEW_TOKENS, ours.decode(16), theirs.decode(16), 1.1),
        _compare(f"prefill, 512 tokens, {where}", 512, ours.prefill(512), theirs.prefill(512), 1.0),
    ]


def _compare(what: str, num_tokens: int, ours: Callable[[], float], theirs: Callable[[], float], target: float) -> Row:
    """Rates from the median of the seconds that each takes, in turns after one round to warm up."""
    taken = [(ours(), theirs()) for _ in range(ROUNDS + 1)][1:]
    own_s, their_s = (statistics.median(times) for times in zip(*taken, strict=True))
    return at_least(what, num_tokens / own_s, "tok/s", num_tokens / their_s, "transformers", target)


class Ours:
    """One stage with the whole model."""

    def __init__(
        self, weights: WeightSource, *, device: str, threads: int, settings: Mapping[str, str] | None = None
    ) -> None:
        layers = weights.config.num_layers
        self._vocab_size = weights.config.vocab_size
        self._backend = TorchBackend(BackendOptions(device=device, threads=threads, settings=dict(settings or {})))
        block_size = max(self._backend.profile().block_sizes)
        self._blocks = -(-TOKENS_PER_SEQUENCE // block_size)  # blocks of one sequence
        self._backend.load(make_slices([LayerRange(0, layers)], layers), weights, lambda _progress: None)
        self._backend.allocate_kv(num_blocks=16 * self._blocks, block_size=block_size)

    def decode(self, count: int) -> Callable[[], float]:
        """Seconds for NEW_TOKENS greedy steps of so many sequences, their prompts being computed."""

        def run() -> float:
            ids = self._step(count, 0, prompts(count, PROMPT_TOKENS, self._vocab_size))
            start = time.perf_counter()
            for index in range(NEW_TOKENS):
                ids = self._step(count, PROMPT_TOKENS + index, ids[:, None])
            return time.perf_counter() - start

        return run

    def prefill(self, num_tokens: int) -> Callable[[], float]:
        """Seconds for one prompt."""

        def run() -> float:
            prompt = prompts(1, num_tokens, self._vocab_size)
            start = time.perf_counter()
            self._step(1, 0, prompt)
            return time.perf_counter() - start

        return run

    def _step(self, count: int, position: int, ids: np.ndarray) -> np.ndarray:
        """ids [count, n] at ``position`` of each sequence -> the most likely next ids [count]."""
        rows = tuple(
            StepRow(
                sequence=SequenceId(index),
                position=position,
                num_tokens=ids.shape[1],
                runs=(BlockRun(index * self._blocks, self._blocks),),
            )
            for index in range(count)
        )
        last = np.arange(1, count + 1, dtype=np.int32) * ids.shape[1] - 1
        prepared = self._backend.prepare(Step(step=StepId(1), slice_index=0, rows=rows, logit_rows=last))
        output = self._backend.collect(self._backend.submit(prepared, ids.reshape(-1).astype(np.int32)))
        assert output.logits is not None
        return output.logits.argmax(-1)


class Transformers:
    """``generate`` and the bare model of ``transformers``."""

    def __init__(self, weights: WeightSource, *, device: str) -> None:
        model: Any = reference_model(weights)
        self._model = model if device == "cpu" else model.to(device=device, dtype=torch.bfloat16)
        self._device = device
        self._vocab_size = weights.config.vocab_size

    def decode(self, count: int) -> Callable[[], float]:
        """Seconds for NEW_TOKENS greedy steps: a long run less a short one."""

        def run() -> float:
            return self._generate(count, NEW_TOKENS + 1) - self._generate(count, 1)

        return run

    def prefill(self, num_tokens: int) -> Callable[[], float]:
        """Seconds for one prompt, logits of its last token only."""

        def run() -> float:
            ids = torch.from_numpy(prompts(1, num_tokens, self._vocab_size)).to(self._device)
            with torch.inference_mode():
                start = time.perf_counter()
                self._model(ids, logits_to_keep=1, use_cache=True).logits.argmax(-1).tolist()  # waits for the device
                return time.perf_counter() - start

        return run

    def _generate(self, count: int, num_tokens: int) -> float:
        ids = torch.from_numpy(prompts(count, PROMPT_TOKENS, self._vocab_size)).to(self._device)
        wanted: dict[str, Any] = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": False}
        start = time.perf_counter()
        self._model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **wanted)
        return time.perf_counter() - start


def prompts(count: int, num_tokens: int, vocab_size: int) -> np.ndarray:
    """[count, tokens] int64, the same in every call."""
    return np.random.default_rng(1).integers(0, vocab_size, (count, num_tokens))


def reference_model(weights: WeightSource) -> PreTrainedModel:
    """A Llama with default rotary embedding, as the demo model is, in float32."""
    transformers_logging.set_verbosity_error()
    warnings.filterwarnings("ignore", module="transformers")
    config = weights.config
    assert config.architecture == "llama"
    assert first_rope(config).scaling == "default"
    with torch.device("meta"):
        model = LlamaForCausalLM(_llama_config(config))
    model = model.to_empty(device="cpu").eval()
    (part,) = make_slices([LayerRange(0, config.num_layers)], config.num_layers)
    tensors = {info.name: torch.from_numpy(as_float32(weights.read(info.name))) for info in weights.tensors(part)}
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # its buffers were on the meta device
    return model


def _llama_config(config: ModelConfig) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=first_dense(config).inner,
        num_hidden_layers=config.num_layers,
        num_attention_heads=first_attention(config).num_heads,
        num_key_value_heads=first_attention(config).num_kv_heads,
        head_dim=first_attention(config).head_dim,
        max_position_embeddings=config.context_length,
        rms_norm_eps=config.norm.eps,
        rope_parameters={"rope_type": "default", "rope_theta": first_rope(config).theta},
        tie_word_embeddings=config.tied_embeddings,
        eos_token_id=None,
        bos_token_id=None,
    )


if __name__ == "__main__":
    print_rows("backend", backend_rows(open_weights(Path(sys.argv[1]))))
