"""The whole product beside the same numbers: real nodes, one of torch and one of MLX, asked over HTTP."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from local_nodes import running_nodes
from referee_llama import Llama
from referee_models import FAMILIES, TOKENS, conversion, slug, write_checkpoint
from referee_product import SIDES, greedy_ids
from referee_table import FLOAT_BAR, log_softmax

from edgepipe.cli.demo import even_layers
from edgepipe.store.store import ModelStore
from edgepipe.weights.weights import open_weights

NUM_TOKENS = 24
_HTTP_S = 120
_START_S = 240
_HIDDEN = 64


@dataclass(frozen=True, slots=True)
class Served:
    """What a cluster answered for one family."""

    family: str
    largest: float  # difference of the prompt's log-probabilities to llama.cpp's, relative to the largest logit
    same_ids: bool | None  # whether a demo's greedy tokens are each backend's own; None: not asked

    @property
    def met(self) -> bool:
        """Log-probabilities add the errors of two logits."""
        return self.largest <= 2 * FLOAT_BAR and self.same_ids is not False

    def cells(self) -> list[str]:
        """The cells of the table."""
        ids = {True: f"the same {NUM_TOKENS}", False: "others", None: ""}[self.same_ids]
        return [self.family, f"{self.largest:.0e}", ids, "" if self.met else "missed"]


def served_lines(llama: Llama, names: Sequence[str], models: Path) -> Iterator[Served]:
    """Serve an F32 file of each family, and run a demo of those with recurrent layers."""
    if not names:
        return
    files = _files(llama, names, models)
    store = models / "store"
    shutil.rmtree(store, ignore_errors=True)
    scores = served_scores(files, store, TOKENS)
    for name, file in files.items():
        logits = llama.logits(file, TOKENS).astype(np.float64)
        right = log_softmax(logits)[np.arange(len(TOKENS) - 1), TOKENS[1:]]
        same: bool | None = None
        if FAMILIES[name].recurrent:
            demo = demo_ids(file, store, TOKENS)
            same = all(demo == greedy_ids(file, side, TOKENS, NUM_TOKENS) for side in list(SIDES)[:2])
        yield Served(name, float(np.abs(scores[name] - right).max() / np.abs(logits).max()), same)
        shutil.rmtree(file.parent)


def _files(llama: Llama, names: Sequence[str], models: Path) -> dict[str, Path]:
    """Make each family's F32 file. Its values are exact in bf16, as those of published models are."""
    jobs: dict[str, dict[str, str]] = {}
    for name in names:
        work = models / f"{slug(name)}-served"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        write_checkpoint(FAMILIES[name], work, hidden=_HIDDEN, grid=1 / 256)
        jobs[name] = conversion(name, work, f"{slug(name)}-F32.gguf")
    errors = llama.convert(list(jobs.values()), models)
    if any(errors.values()):
        raise RuntimeError(f"the converter refused some: {errors}")
    return {name: Path(job["file"]) for name, job in jobs.items()}


def served_scores(models: dict[str, Path], folder: Path, tokens: Sequence[int]) -> dict[str, npt.NDArray[np.float64]]:
    """Serve files one after the other, activations in float32; return the log-probabilities [T - 1] of the prompt."""
    store = ModelStore(folder)
    found: dict[str, npt.NDArray[np.float64]] = {}
    with running_nodes(2, models_dir=folder, threads=1, backends=("torch", "mlx")) as nodes:
        for name, path in models.items():
            model = store.pull(str(path)).model_id
            exact = ("--dtype", "float32", "--activations", "float32")
            plan = even_layers(open_weights(path).config.num_layers, ["n0", "n1"])
            nodes[0].edgepipe("serve", model, "--plan", plan, *exact)
            body = {"model": model, "prompt": list(tokens), "max_tokens": 0, "echo": True, "logprobs": 0}
            answer = _ask(nodes[0].http_port, body)
            scores = answer["choices"][0]["logprobs"]["token_logprobs"]
            found[name] = np.array(scores[1:], np.float64)
            nodes[0].edgepipe("stop", model)
    return found


def demo_ids(file: Path, folder: Path, tokens: Sequence[int]) -> list[int]:
    """Return the greedy tokens that ``edgepipe demo --backends torch,mlx`` gives behind a prompt."""
    model = ModelStore(folder).pull(str(file)).model_id
    with _demo(model, folder) as port:
        wanted = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return _ask(port, {"model": model, "prompt": list(tokens), **wanted})["choices"][0]["token_ids"]


@contextmanager
def _demo(model: str, folder: Path) -> Generator[int]:
    """Run the command with ``--serve``; yields its HTTP port."""
    flags = ["--serve", "--backends", "torch,mlx", "--model", model, "--models-dir", str(folder)]
    command = [sys.executable, "-P", "-m", "edgepipe.cli", "demo", *flags]
    environment = os.environ | {"EDGEPIPE_INTERFACE": "127.0.0.1", "EDGEPIPE_LOCAL_KEY": "no", "COLUMNS": "120"}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        try:
            text = ""
            while "status --data-dir" not in text:
                line = process.stdout.readline()
                if not line:
                    raise RuntimeError(f"the demo of {model} ended: {text[-600:]}")
                text += line
            match = re.search(r"http://[^/\s]*:(\d+)/v1", text)
            assert match is not None, text
            yield int(match[1])
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=_START_S)


def _ask(port: int, body: dict[str, Any]) -> dict[str, Any]:
    """Send one completion to a node's HTTP."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=_HTTP_S) as answered:
        return json.load(answered)
