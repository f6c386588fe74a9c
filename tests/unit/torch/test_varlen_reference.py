"""The reference kernel has the signature of torch's own, and computes attention."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import math
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from edgepipe_torch.cuda.paging import VarlenAttention  # noqa: E402

from tests.support.numerics.varlen_reference import varlen_attention  # noqa: E402


def test_its_signature_is_that_of_torchs_kernel() -> None:
    """A call that fits one fits the other: the same first parameters, the rest by the same names.

    The test reads torch's source, because importing the kernel imports torch's compiler: six seconds.
    """
    spec = importlib.util.find_spec("torch.nn.attention.varlen")
    if spec is None or spec.origin is None:
        pytest.skip("this torch has no kernel")
    functions = ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body
    (theirs,) = (item.args for item in functions if isinstance(item, ast.FunctionDef) and item.name == "varlen_attn")
    named = [argument.arg for argument in theirs.kwonlyargs]
    if "block_table" not in named:
        pytest.skip("this torch's kernel takes no block table")
    for function in (varlen_attention, VarlenAttention.__call__):
        own = inspect.getfullargspec(function)
        assert [name for name in own.args if name != "self"] == [argument.arg for argument in theirs.args]
        assert set(own.kwonlyargs) <= set(named)


@pytest.mark.parametrize("window", [None, 1, 3, 20])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_it_attends_key_by_key(window: int | None, num_kv_heads: int) -> None:
    """Against loops over rows, heads and keys in float64."""
    draw = np.random.default_rng(7)
    page, lengths, counts = 4, [9, 1, 6], [3, 1, 6]
    keys, values = (draw.standard_normal((8, page, num_kv_heads, 8)).astype(np.float32) for _ in range(2))
    queries = draw.standard_normal((sum(counts), 4, 8)).astype(np.float32)
    tables = np.array([[5, 2, 7], [1, 0, 0], [3, 6, 0]], np.int32)
    found = varlen_attention(
        torch.from_numpy(queries),
        torch.from_numpy(keys),
        torch.from_numpy(values),
        torch.tensor([0, 3, 4, 10], dtype=torch.int32),
        torch.tensor([0, 9, 10, 16], dtype=torch.int32),
        6,
        12,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=True,
        seqused_k=torch.tensor(lengths, dtype=torch.int32),
        block_table=torch.from_numpy(tables),
        num_splits=1,
    )
    assert not isinstance(found, tuple)
    row = 0
    for length, count, table in zip(lengths, counts, tables, strict=True):
        for own in range(length - count, length):
            first = 0 if window is None else max(0, own - window + 1)
            for head in range(4):
                places = [(table[at // page], at % page, head * num_kv_heads // 4) for at in range(first, own + 1)]
                query = queries[row, head].astype(np.float64)
                weights = np.exp([query @ keys[place] / math.sqrt(8) for place in places])
                expected = sum(weight * values[place] for weight, place in zip(weights, places, strict=True))
                np.testing.assert_allclose(found[row, head], expected / weights.sum(), atol=1e-5)
            row += 1
