"""Recurrent layers without a GPU: logits, both forms of a recurrence, emulated tokens, reuse, steps.

    scripts/bench state [--full] [PART ...]

Parts: ``logits``  tests of every family's logits against transformers, alone and in rings of torch and MLX
       ``chunked`` prompts of 4,096 tokens in the chunked form against token by token, torch and MLX
       ``truth``   emulated tokens under cancels, preemption, lost stages and prefix hits, each checked
       ``reuse``   the second TTFT of a 4k prompt: a tiny checkpoint in real processes, and an emulated Qwen3.6-35B-A3B
       ``layers``  decode steps of layers with the shape of Qwen3.6-35B-A3B at Q4_K_M against the bytes that they read
       ``planned`` ``plan --emulate`` against decode rates that others measured

Rows of ``layers`` are the probe's, whose routers prefer some experts. ``--full`` takes more rounds and models, and
checks 500,000 tokens. Without it, ten minutes on two quiet cores.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from edgepipe_mlx import MlxBackend
from edgepipe_torch import TorchBackend
from figures import ROOT, Row, below
from layer_steps import Stage, layer_rows
from parts import Part, run_parts, tested
from published_rates import HYBRIDS, published_rows
from state_reuse import reuse_rows
from truth import lossy_rows

from edgepipe.backend.types import ActivationType, BackendOptions
from edgepipe.weights.mixes import named_model
from edgepipe.weights.weights import open_weights
from tests.support.models.recurrent_checkpoints import TOKENS as PROMPT
from tests.support.models.recurrent_checkpoints import save_checkpoint
from tests.support.numerics.recurrent_forms import LEAST_GAP, MIXERS, compare_forms

MODEL = "qwen3.6-35b-a3b:q4_k_m"
EMULATED = "rtx4090, m4max"
TESTS = {
    "logits of files and folders, tests": ("tests/numerics/test_recurrent_reference.py",),
    "logits on torch, tests": ("tests/numerics/test_recurrent_torch.py",),
    "logits on MLX and rings of both, tests": ("tests/unit/mlx/test_mlx_recurrent.py",),
}
LONG = 4096  # tokens
LARGE_MIXERS = ("gated DeltaNet, heads of 128", "Mamba-2, states of 128", "short convolution")
FORMS_BOUND = 1e-3  # share of the largest logit
TOKENS, FULL_TOKENS = 10_000, 500_000
THREADS = (1, 2)
STEP_ROWS, FULL_STEP_ROWS = (1, 4), (1, 4, 16, 64)
ROUNDS, FULL_ROUNDS = 10, 30
STEP_TARGET = 2.2
_OPTIONS = BackendOptions(device="cpu", dtype="float32", activation_type=ActivationType.FLOAT32, threads=1)


def logits_rows(_full: bool) -> list[Row]:
    """Run the tests that compare families with transformers: relative differences of 1e-4 at most, the same ids."""
    return [tested(name, files) for name, files in TESTS.items()]


def chunked_rows(full: bool) -> list[Row]:
    """Compare both forms of a recurrence over a long prompt: each kind of mixer as large as real ones, or all."""
    rows: list[Row] = []
    for mixer in MIXERS if full else LARGE_MIXERS:
        with tempfile.TemporaryDirectory() as name:
            save_checkpoint(MIXERS[mixer](), Path(name), PROMPT, slow=True)
            for kind, backend in (("torch", TorchBackend), ("MLX", MlxBackend)):
                forms = compare_forms(backend(_OPTIONS), open_weights(Path(name)), LONG)
                what = f"chunked against step form, {LONG} tokens, {mixer}, {kind}"
                rows.append(below(what, forms.difference, "of the largest logit", FORMS_BOUND))
                what = f"  next ids that differ, of {forms.decided} with gaps above {LEAST_GAP}"
                rows.append(below(what, forms.wrong, "ids", 0))
    return rows


def truth_rows(full: bool) -> list[Row]:
    """Check emulated tokens with states, of which each is an exact integer function of the tokens before, in order."""
    return lossy_rows("states", FULL_TOKENS if full else TOKENS)


def steps_rows(full: bool) -> list[Row]:
    """Time the layers on one thread and on two."""
    config, table = named_model(MODEL)
    counts, rounds = (FULL_STEP_ROWS, FULL_ROUNDS) if full else (STEP_ROWS, ROUNDS)
    rows: list[Row] = []
    for threads in THREADS:
        stage = Stage(config, table, threads)
        rows += layer_rows(MODEL, stage, threads, rounds, counts=counts, target=STEP_TARGET, shares=False)
        stage.backend.close()
    return rows


def planned_rows(_full: bool) -> list[Row]:
    """Plan for two machines as the command does, and compare the rates of single ones with published ones."""
    command = [sys.executable, "-m", "edgepipe.cli", "plan", MODEL, "--emulate", EMULATED, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    fits = not done.returncode
    found = json.loads(done.stdout) if fits else {}
    print(done.stderr, file=sys.stderr)
    name = f"edgepipe plan {MODEL} --emulate '{EMULATED}': {found.get('plan', 'does not fit')}"
    row = Row(name, found.get("one_chat_tokens_per_s", 0.0), "tok/s", target="fits", met=fits)
    return [row, *published_rows(HYBRIDS)]


PARTS: dict[str, Part] = {
    "logits": logits_rows,
    "chunked": chunked_rows,
    "truth": truth_rows,
    "reuse": reuse_rows,
    "layers": steps_rows,
    "planned": planned_rows,
}


if __name__ == "__main__":
    run_parts("state", PARTS)
