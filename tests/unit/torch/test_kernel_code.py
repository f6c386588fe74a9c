"""The bench's reading of compiled CUDA code: loops, registers, blocks."""

from __future__ import annotations

import struct

import pytest

pytest.importorskip("torch")

from scripts.kernel_code import (
    H100,
    RTX_4090,
    Card,
    blocks_of,
    busy_blocks,
    bytes_in_flight,
    codes_of,
    find_disassembler,
    registers_of,
    stack_bytes_of,
    tile_instructions,
)
from tests.support.backends.kernel_forms import FORMS
from tests.support.backends.nvrtc import nvrtc_for

OTHER, OWN = "affine_mm_8", "affine_mm_1"


def code(kernel: str, body: int, products: int) -> str:
    """A kernel with a loop of so many instructions, in another loop, behind a short one."""
    lines = ["HMMA.16816.F32.BF16 R32, R16, R32, RZ"] * products
    lines += ["IADD3 R1, R2, R3, RZ"] * (body - products - 1)
    lines = [".L_x_1:", "MOV R1, R2", ".L_x_2:", *lines, "@!P1 BRA `(.L_x_2)", "MOV R2, R1", "@P2 BRA `(.L_x_1)"]
    lines = [f'\t.section\t.text.{kernel},"ax",@progbits', ".L_x_0:", "FADD R1, R1, R2", "@P0 BRA `(.L_x_0)", *lines]
    return "\n".join(line if line.startswith((".L", "\t")) else f"        /*0af0*/   {line} ;" for line in lines)


@pytest.mark.parametrize(("products", "expected"), [(8, 50), (16, 25)], ids=["a tile", "two at once"])
def test_the_loop_over_tiles_is_found(products: int, expected: int) -> None:
    text = "\n".join([code(OTHER, 90, 64), code(OWN, 50, products), code(OTHER, 90, 64)])
    assert tile_instructions(text, OWN, 8) == expected
    assert tile_instructions(text, OWN, 64) is None
    assert tile_instructions(text, "affine_mm_4", 8) is None


def test_registers_are_read_from_either_place() -> None:
    """Of a section's header, or of an attribute beside the names of symbols."""
    named = [("", 3, 0, b""), (".text.first", 1, 61 << 24, b""), (".text.second", 1, 0, b"")]
    names = b"\0first\0second\0"
    symbols = b"".join(struct.pack("<I20x", start) for start in (0, 1, 7))
    info = struct.pack("<BBHBBHIIBBHII", 3, 0x36, 5, 4, 0x2F, 8, 2, 143, 4, 0x11, 8, 2, 16)
    named += [(".symtab", 2, 0, symbols), (".strtab", 3, 0, names), (".nv.info", 1, 0, info)]
    assert registers_of(elf(named)) == {"first": 61, "second": 143}
    assert stack_bytes_of(elf(named)) == {"second": 16}


def elf(sections: list[tuple[str, int, int, bytes]]) -> bytes:
    """An ELF file of sections with name, type, ``sh_info`` and content; the first one holds the names."""
    starts, names = [], b""
    for name, *_ in sections:
        starts.append(len(names))
        names += name.encode() + b"\0"
    sections = [("", 3, 0, names), *sections[1:]]
    body, headers = b"", b""
    for start, (_, kind, info, data) in zip(starts, sections, strict=True):
        headers += struct.pack("<IIQQQQIIQQ", start, kind, 0, 0, 64 + len(body), len(data), 0, info, 0, 0)
        body += data
    head = bytearray(64)
    struct.pack_into("<Q", head, 0x28, 64 + len(body))
    struct.pack_into("<HHH", head, 0x3A, 64, len(sections), 0)
    return bytes(head) + body + headers


def test_blocks_of_a_multiprocessor() -> None:
    """65,536 registers; a warp takes them in units of 256, 8 to a thread."""
    assert [blocks_of(RTX_4090, registers, 20 * 1024) for registers in (64, 65, 80, 128, 129)] == [4, 3, 3, 2, 1]
    assert blocks_of(RTX_4090, 32, 33 * 1024) == 2, "shared memory"
    assert (blocks_of(RTX_4090, 16, 1024), blocks_of(H100, 16, 1024)) == (6, 8), "threads"


def test_bytes_in_flight() -> None:
    """Eight warps have asked for a tile of 2,048 codes of 4 bits each, with a scale per 32."""
    needed = 0.6e-6 * RTX_4090.bytes_per_s / RTX_4090.multiprocessors
    assert bytes_in_flight(FORMS["Q4_0"], RTX_4090, 4) == pytest.approx(4 * 8 * (1024 + 16 * 4 * 2) / needed)


@pytest.mark.parametrize(("card", "least"), [(RTX_4090, 1.5), (H100, 1.0)], ids=["RTX 4090", "H100"])
@pytest.mark.parametrize("name", ["Q4_K", "Q4_0"])
def test_one_row_keeps_enough_of_a_weight_under_way(name: str, card: Card, least: float) -> None:
    """4,096 features give each multiprocessor nearly two blocks, of the four that it holds."""
    assert bytes_in_flight(FORMS[name], card, busy_blocks(FORMS[name], card, 4)) >= least


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_products_as_compiled(name: str) -> None:
    """Up to 8 rows of x: four blocks of Q4_K share a multiprocessor. 64: two of each form, and nothing spills."""
    disassembler = find_disassembler()
    found = codes_of(nvrtc_for(89), FORMS[name], RTX_4090, disassembler)
    assert [(each.rows, each.experts) for each in found] == [
        (8, False),
        (16, False),
        (32, False),
        (64, False),
        (64, True),
    ]
    assert all(each.blocks >= 2 for each in found)
    assert not any(each.stack_bytes for each in found)
    if name == "Q4_K":
        assert found[0].blocks == 4
        if disassembler is not None:
            assert found[0].instructions is not None
            assert found[0].instructions <= 295
