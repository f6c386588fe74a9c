"""What a measurement shows, and what its file must not contain."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from edgepipe.backend.types import KernelError
from edgepipe.cli.doctor.measurement import (
    Measured,
    figure_lines,
    file_name,
    kernel_line,
    measured_from,
    without_names,
)

FOUND = Measured(
    edgepipe="0.1.0",
    date="2026-11-29",
    system="Linux 6.1 x86_64",
    python="3.11.9",
    backend="torch",
    device="cuda:0",
    chip="NVIDIA GeForce RTX 4090",
    dtype="bfloat16",
    cores=8,
    memory_bytes=24 << 30,
    libraries={"torch": "2.13.0"},
    others_share=0.05,
    figures={"decode_1": 120.0, "experts_1": 50.0, "memory": 935.0},
    predicted={"decode_1": 150.0, "experts_1": 100.0},
    sheet="NVIDIA GeForce RTX 4090",
    kernels=[
        KernelError(kernel="product Q4_K", error=0.5),
        KernelError(kernel="product Q6_K", error=1.5),
        KernelError(kernel="attention", reason="not launched"),
    ],
)


def test_speed_is_above_one_where_the_device_is_faster_than_predicted() -> None:
    shares = {title: share for title, _, _, share in figure_lines(FOUND)}
    assert shares["llama-3.1-8b:q4_k_m, 1 at once"] == "0.80x"
    assert shares["layer of qwen3-30b-a3b:q4_k_m, rows: 1"] == "2.00x"
    assert shares["memory rate"] == ""


def test_a_kernel_above_its_bound_is_wrong_and_one_that_did_not_run_is_missing() -> None:
    assert [kernel.kernel for kernel in FOUND.wrong] == ["product Q6_K"]
    assert [kernel.kernel for kernel in FOUND.missing] == ["attention"]
    assert "2 kernels" in kernel_line(FOUND)
    assert "product Q6_K" in kernel_line(FOUND)
    nan = replace(FOUND, kernels=[KernelError(kernel="product Q4_0", error=float("nan"))])
    assert nan.wrong


def test_a_file_is_read_as_it_was_written_and_another_form_is_refused() -> None:
    value = json.loads(json.dumps(FOUND.as_json()))
    assert measured_from(value) == FOUND
    with pytest.raises(TypeError, match="form 2"):
        measured_from(value | {"format": 2})


def test_the_file_is_named_after_the_chip() -> None:
    assert file_name(FOUND) == "edgepipe-measured-nvidia-geforce-rtx-4090-torch-2026-11-29.json"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("libnvrtc.so: cannot open /home/eva/env/lib/libnvrtc.so.12", "libnvrtc.so: cannot open PATH"),
        ("PermissionError: '/Users/eva/Library/x.o'", "PermissionError: 'PATH'"),
        ("eva cannot write on studio-pc", "... cannot write on ..."),
        ("evaluated on studio-pc2: 3/4", "evaluated on studio-pc2: 3/4"),
        ("C:\\Users\\eva\\x is missing", "PATH is missing"),
    ],
)
def test_names_and_paths_leave_the_texts(text: str, expected: str) -> None:
    assert without_names(text, ["/home/eva", "eva", "studio-pc", ""]) == expected
