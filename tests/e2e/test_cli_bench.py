"""``edgepipe bench``: real nodes with emulated devices, an emulated network, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

FLAGS = (
    *("--emulate", "2x rtx4090", "--as-model", "smollm2-135m", "--workload", "fixed", "--requests", "6"),
    *("--prompt-tokens", "20", "--output-tokens", "8", "--json"),
)


def test_a_bench_compares_policies_and_links(tmp_path: Path) -> None:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("EDGEPIPE_")}
    compared = ("--compare", "policy=throttled,sarathi", "--link", "1gbit,2ms")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "edgepipe.cli", "bench", *FLAGS, *compared],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env=kept | {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    runs = json.loads(done.stdout)["runs"]
    assert [run["facts"]["label"] for run in runs] == ["policy=throttled", "policy=sarathi"]
    for run in runs:
        assert (run["num_requests"], run["num_failed"], run["output_tokens"]) == (6, 0, 48)
        assert run["itl_s"]["p50"] >= 0.004  # to the second stage, and its token back
        assert [stage["busy"] > 0 for stage in run["stages"]] == [True, True]
        assert run["num_steps"] >= 8
        assert 0 < run["kv_mean"] <= run["kv_peak"] <= 1
    assert not list(tmp_path.glob("edgepipe-bench-*"))
