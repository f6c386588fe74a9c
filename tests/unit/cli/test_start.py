"""A command starts fast: it imports only what it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PRINT_MODULES = """
import sys
from edgepipe.cli.__main__ import start
try:
    start()
except SystemExit:
    pass
print(*sorted(sys.modules), file=sys.__stderr__)
"""
HEAVY = {"torch", "mlx", "transformers", "huggingface_hub", "tokenizers", "starlette", "uvicorn", "zeroconf"}
NUMBERS, NETWORK, PICTURES = {"numpy"}, {"grpc", "cryptography", "google"}, {"rich"}


@pytest.mark.parametrize(
    ("words", "without", "most"),
    [
        (["--help"], HEAVY | NUMBERS | NETWORK | PICTURES | {"pydantic"}, 360),
        (["version"], HEAVY | NUMBERS | NETWORK | PICTURES, 430),
        (["status"], HEAVY | NUMBERS, 650),
        (["plan", "qwen3:8b", "--emulate", "rtx4090"], HEAVY | NETWORK, 700),
        (["models", "list"], HEAVY | NETWORK, 660),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_command_imports_only_what_it_needs(words: list[str], without: set[str], most: int, tmp_path: Path) -> None:
    environment = {"EDGEPIPE_DATA_DIR": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-P", "-c", PRINT_MODULES, *words],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        check=True,
    )
    modules = ran.stderr.splitlines()[-1].split()
    packages = {name.partition(".")[0] for name in modules}
    assert "edgepipe" in packages
    assert not packages & without
    assert len(modules) <= most
