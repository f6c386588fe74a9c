"""Describe the compiled CUDA products without a GPU: instructions, registers, blocks, bytes in flight.

NVRTC compiles for an RTX 4090 (sm_89). NVIDIA's ``nvdisasm`` counts instructions, where it is installed
(``pip install nvidia-cuda-nvrtc-cu12 nvidia-cuda-nvdisasm``).
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgepipe_torch.cuda.kernels.driver import THREADS
from edgepipe_torch.cuda.kernels.forms import (
    EXPERT_MACROS,
    TILE_INPUTS,
    TILE_ROWS,
    KernelForm,
    expert_files,
    kernel_source,
    options,
)
from edgepipe_torch.cuda.kernels.nvrtc import Nvrtc
from edgepipe_torch.cuda.kernels.products import MOST_ROWS, WARPS, column_tiles_of, product_plan

_OUT, _IN = 4096, 4096  # features of the product whose shared memory counts
_LATENCY_S = 0.6e-6  # latency of a read from memory
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?P<text>[^;/]+);")
_LABEL = re.compile(r"^\s*(?P<label>\.L_x_\d+):")
_REGCOUNT = 0x2F  # EIATTR_REGCOUNT of .nv.info
_FRAME_SIZE = 0x11  # EIATTR_FRAME_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU's data sheet."""

    name: str
    architecture: int
    multiprocessors: int
    bytes_per_s: float  # effective
    registers: int = 65_536  # registers of a multiprocessor
    threads: int = 2048
    shared_bytes: int = 0


RTX_4090 = Card(
    name="RTX 4090",
    architecture=89,
    multiprocessors=128,
    bytes_per_s=0.935e12,
    threads=1536,
    shared_bytes=100 * 1024,
)
H100 = Card(name="H100", architecture=90, multiprocessors=132, bytes_per_s=3.35e12 * 0.9, shared_bytes=228 * 1024)


def registers_of(cubin: bytes) -> dict[str, int]:
    """Return the registers of a thread of each kernel in a cubin."""
    sections = list(_sections(cubin))
    found = {
        name.removeprefix(".text."): info >> 24
        for name, info, _ in sections
        if name.startswith(".text.") and info >> 24
    }
    return found | _by_function(sections, _REGCOUNT)


def stack_bytes_of(cubin: bytes) -> dict[str, int]:
    """Return the memory of a thread's stack of each kernel in a cubin: more than 0 where registers spill."""
    return _by_function(list(_sections(cubin)), _FRAME_SIZE)


def _by_function(sections: list[tuple[str, int, bytes]], attribute: int) -> dict[str, int]:
    """Return an attribute of ``.nv.info`` by the name of its function."""
    symbols, found = _symbols(sections), dict[str, int]()
    for name, _, data in sections:
        if name == ".nv.info":
            for code, value in _attributes(data):
                if code == attribute and len(value) == 8:
                    symbol, count = struct.unpack("<II", value)
                    found[symbols[symbol]] = count
    return found


def _sections(cubin: bytes) -> Iterator[tuple[str, int, bytes]]:
    """Yield name, ``sh_info`` and content of each section of an ELF file of 64 bits."""
    start = struct.unpack_from("<Q", cubin, 0x28)[0]
    size, count, names_at = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, start + size * index) for index in range(count)]
    names = headers[names_at][4]
    for name, kind, _flags, _address, offset, length, _link, info, _align, _entry in headers:
        begin = names + name
        text = cubin[begin : cubin.index(b"\0", begin)].decode()
        yield text, info, b"" if kind == 8 else cubin[offset : offset + length]


def _symbols(sections: list[tuple[str, int, bytes]]) -> list[str]:
    content = {name: data for name, _, data in sections}
    table, names = content.get(".symtab", b""), content.get(".strtab", b"")
    starts = [struct.unpack_from("<I", table, at)[0] for at in range(0, len(table), 24)]
    return [names[start : names.index(b"\0", start)].decode() for start in starts]


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield code and value of each attribute of ``.nv.info`` that has a size."""
    at = 0
    while at + 4 <= len(info):
        form, code, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == 4:  # others hold their value in place of the size
            yield code, info[at : at + size]
            at += size


def tile_instructions(disassembly: str, kernel: str, products: int) -> float | None:
    """Return a kernel's instructions for a tile of the weight and a warp: of the smallest loop that multiplies tiles.

    products  tensor-core products of a tile
    """
    places: dict[str, int] = {}
    code: list[str] = []
    within = False
    for line in disassembly.splitlines():
        if line.lstrip().startswith(".section") or line.lstrip().startswith(".text."):
            within = re.search(rf"\.text\.{kernel}\b", line) is not None
        if not within:
            continue
        if label := _LABEL.match(line):
            places[label["label"]] = len(code)
        if instruction := _INSTRUCTION.search(line):
            code.append(instruction["text"])
    loops: list[tuple[int, int]] = []  # instructions, products
    for index, text in enumerate(code):
        target = re.search(r"BRA\S*\s.*?(\.L_x_\d+)", text)
        if target and places.get(target[1], index + 1) <= index:
            body = code[places[target[1]] : index + 1]
            count = sum("HMMA" in each for each in body)
            if count >= products:
                loops.append((len(body), count))
    if not loops:
        return None
    instructions, count = min(loops)
    return instructions * products / count


@dataclass(frozen=True, slots=True, kw_only=True)
class FormCode:
    """A form's products of up to some rows."""

    rows: int
    experts: bool  # whether the product is for a mixture's experts
    registers: int
    stack_bytes: int  # stack of one thread; 0: nothing spills
    blocks: int  # blocks that a multiprocessor holds
    instructions: float | None  # for a tile and a warp; None: not disassembled


def blocks_of(card: Card, registers: int, shared_bytes: int) -> int:
    """Return how many blocks a multiprocessor holds: registers are given out to warps in units of 256."""
    by_registers = card.registers // (-(-registers * 32 // 256) * 256 * WARPS)
    return min(by_registers, card.threads // THREADS, card.shared_bytes // (shared_bytes + 1024))


def codes_of(nvrtc: Nvrtc, form: KernelForm, card: Card, disassembler: Path | None) -> list[FormCode]:
    """Compile a form's products and describe their code: by size, then the largest one of experts."""
    dense = nvrtc.compile(kernel_source(), architecture=card.architecture, options=options(form.macros))
    experts = nvrtc.compile(
        kernel_source(expert_files(form)),
        architecture=card.architecture,
        options=options(form.macros | EXPERT_MACROS),
    )
    terms = 2 if "LEVELS_REST" in form.macros else 1
    found: list[FormCode] = []
    for cubin, rows in [*((dense, rows) for rows in (8, 16, 32, MOST_ROWS)), (experts, MOST_ROWS)]:
        tiles = column_tiles_of(rows)
        name = f"affine_mm_{tiles}" if cubin is dense else f"expert_mm_{tiles}"
        registers = registers_of(cubin)[name]
        plan = product_plan(form, _OUT // TILE_ROWS, _IN // TILE_INPUTS, rows, card.multiprocessors)
        text = "" if disassembler is None else disassembled(cubin, disassembler)
        found.append(
            FormCode(
                rows=rows,
                experts=cubin is experts,
                registers=registers,
                stack_bytes=stack_bytes_of(cubin)[name],
                blocks=blocks_of(card, registers, plan.shared_bytes),
                instructions=tile_instructions(text, name, 8 * tiles * terms) if text else None,
            )
        )
    return found


def find_disassembler() -> Path | None:
    """Return ``nvdisasm`` of the system or of NVIDIA's wheel."""
    if found := shutil.which("nvdisasm"):
        return Path(found)
    spec = importlib.util.find_spec("nvidia")
    roots = (spec.submodule_search_locations or ()) if spec else ()
    return next((path for root in roots for path in Path(root).glob("*/bin/nvdisasm")), None)


def disassembled(cubin: bytes, disassembler: Path) -> str:
    """Return a cubin's instructions as text."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        disassembler.chmod(disassembler.stat().st_mode | 0o111)  # pip may have left it without
        command = [str(disassembler), "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def busy_blocks(form: KernelForm, card: Card, blocks: int) -> float:
    """Return the blocks of a multiprocessor while one row is multiplied: as many as it holds, if there are as many."""
    plan = product_plan(form, _OUT // TILE_ROWS, _IN // TILE_INPUTS, 1, card.multiprocessors)
    return min(blocks, plan.blocks / card.multiprocessors)


def bytes_in_flight(form: KernelForm, card: Card, blocks: float) -> float:
    """Return the bytes that a multiprocessor's warps have asked for, over those that the memory needs to be busy."""
    tile = TILE_ROWS * TILE_INPUTS * form.bits / 8 + TILE_ROWS * _scale_bytes(form)
    return blocks * WARPS * tile / (_LATENCY_S * card.bytes_per_s / card.multiprocessors)


def _scale_bytes(form: KernelForm) -> int:
    """Return the bytes of a tile's row beside its codes: scales, offsets, and their bases."""
    groups = TILE_INPUTS // form.group if 0 < form.group < TILE_INPUTS else 1
    sizes = {"float16": 2, "uint16": 2, "float32": 4}
    kinds = [form.scale, *([form.added] if form.offset == "added" else [])]
    values = sum(groups + sizes[kind.base] if kind.factor else groups * sizes[kind.base] for kind in kinds)
    return values + (groups if form.offset == "zeros" else 0)
