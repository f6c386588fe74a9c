"""Products with one weight: sizes of launches and their arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from edgepipe.spec.layer_spec import Activation
from edgepipe_torch.cuda.kernels.driver import SHARED_BYTES, THREADS, Module
from edgepipe_torch.cuda.kernels.forms import TILE_INPUTS, TILE_ROWS, KernelForm
from edgepipe_torch.cuda.packed_tiles import TiledWeight

ACTIVATION_CODES: Mapping[Activation, int] = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2}
MOST_ROWS = 64  # limit of a product's rows; with more, tensor cores wait less if the weight is widened once

_COLUMN_TILES = (1, 2, 4, 8)  # sizes in tiles of 8 rows of x
WARPS = THREADS // 32
_STAGED_BYTES = 24 * 1024  # shared memory for inputs and their sums: four blocks fit a multiprocessor
# Fewest blocks of a multiprocessor, on average. More row tiles per block make fewer blocks read the inputs. Up to 8
# rows are few bytes: there a second block, and with it more of the weight under way, counts more.
_FULL_LOAD, _FULL_LOAD_OF_FEW = 0.9, 1.8
_FIXED_CHUNK = 256  # FIXED_CHUNK of common.cuh
_MOST_SPLITS = 8
_SUMS_TILES, _LAUNCH_TILES = 1, 3  # time of a block's sums and of one more launch, as that of so many input tiles
_ALONE = 1.3  # time of a block that has a multiprocessor for itself: nothing computes while it stages inputs


class WeightStruct(ctypes.Structure):
    """``Weight`` of common.cuh."""

    row_tiles: int
    input_tiles: int
    _fields_ = (
        ("low", ctypes.c_void_p),
        ("high", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("scale_base", ctypes.c_void_p),
        ("offset", ctypes.c_void_p),
        ("offset_base", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("zero", ctypes.c_int),
        ("out_features", ctypes.c_int),
        ("in_features", ctypes.c_int),
        ("row_tiles", ctypes.c_int),
        ("input_tiles", ctypes.c_int),
        ("group_tiles", ctypes.c_int),
        ("spans", ctypes.c_int),
    )


class Products:
    """Kernels of one form on one device."""

    def __init__(self, module: Module, form: KernelForm, *, multiprocessors: int) -> None:
        self._module = module
        self._form = form
        self._multiprocessors = multiprocessors

    def affine_mm(
        self,
        weight: TiledWeight,
        x: Tensor,
        out: Tensor,
        *,
        bias: Tensor | None,
        add: bool,
        activation: Activation | None = None,
    ) -> None:
        """Multiply x [T, I] by the weight into out [T, O], with a bias [O], or adding to out. bf16; T is 1 to 64.

        Columns of x and out are adjacent. x begins at a multiple of 16 bytes.

        activation  the weight and the bias hold gates, then as many ups, in whole row tiles; out is [T, O / 2]
        """
        rows, gated = x.shape[0], activation is not None
        assert not gated or weight.out_features % (2 * TILE_ROWS) == 0
        plan = product_plan(self._form, weight.row_tiles, weight.input_tiles, rows, self._multiprocessors, gated=gated)
        places = plan.blocks * plan.splits * plan.down * plan.column_tiles * 8 * TILE_ROWS if plan.splits > 1 else 0
        sums = torch.empty(places, dtype=torch.float32, device=x.device)
        struct = weight_struct(weight)
        results = _Results(
            out=out.data_ptr(),
            out_stride=out.stride(0),
            bias=None if bias is None else bias.data_ptr(),
            add=add,
            activation=-1 if activation is None else ACTIVATION_CODES[activation],
        )
        self._module.launch(
            f"affine_mm_{plan.column_tiles}",
            blocks=plan.blocks * plan.splits,
            shared_bytes=plan.shared_bytes,
            arguments=(
                struct,
                ctypes.c_void_p(x.data_ptr()),
                ctypes.c_int(x.stride(0)),
                ctypes.c_int(rows),
                results,
                ctypes.c_int(plan.chunk),
                ctypes.c_int(plan.down),
                ctypes.c_void_p(sums.data_ptr()),
                ctypes.c_int(plan.splits),
            ),
        )
        if plan.splits > 1:
            stored = plan.blocks * (plan.down // 2 if gated else plan.down) * plan.column_tiles * 8 * TILE_ROWS
            self._module.launch(
                "add_splits",
                blocks=stored // THREADS,
                shared_bytes=0,
                arguments=(
                    struct,
                    ctypes.c_int(rows),
                    results,
                    ctypes.c_int(plan.down),
                    ctypes.c_void_p(sums.data_ptr()),
                    ctypes.c_int(plan.splits),
                    ctypes.c_int(plan.blocks),
                ),
            )

    def dequantise(self, weight: TiledWeight, rows: Tensor | range, out: Tensor) -> None:
        """Write out features to out [R, I] bf16: consecutive ones, or those of ids [R] int64."""
        listed = isinstance(rows, Tensor)
        count = len(rows)
        if not count:
            return
        blocks = -(-count * weight.input_tiles * 2 // THREADS)  # a thread writes half of a row of a tile
        self._module.launch(
            "dequantise",
            blocks=min(blocks, 64 * self._multiprocessors),
            shared_bytes=self._form.table_bytes,
            arguments=(
                weight_struct(weight),
                ctypes.c_void_p(rows.data_ptr() if listed else None),
                ctypes.c_int(0 if listed else rows.start),
                ctypes.c_int(count),
                ctypes.c_void_p(out.data_ptr()),
            ),
        )


class _Results(ctypes.Structure):
    """``Results`` of products.cu."""

    _fields_ = (
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int),
        ("bias", ctypes.c_void_p),
        ("add", ctypes.c_int),
        ("activation", ctypes.c_int),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductPlan:
    """The launch of a product."""

    column_tiles: int
    down: int  # row tiles of a block
    blocks: int  # for all row tiles
    splits: int  # blocks that share the inputs of row tiles
    chunk: int  # inputs that a block stages at a time
    shared_bytes: int


def product_plan(
    form: KernelForm, row_tiles: int, input_tiles: int, rows: int, multiprocessors: int, *, gated: bool = False
) -> ProductPlan:
    """Return the launch of a product with a weight of so many tiles.

    gated  a block takes gates and their ups
    """
    tiles = column_tiles_of(rows)
    down = warps_down(form, row_tiles, rows, multiprocessors, gated=gated)
    chunk = staged_inputs(form, input_tiles, rows, down, column_tiles=tiles)
    blocks = -(-row_tiles // down)
    return ProductPlan(
        column_tiles=tiles,
        down=down,
        blocks=blocks,
        splits=_splits(blocks, input_tiles, multiprocessors) if is_largest(tiles) else 1,
        chunk=chunk,
        shared_bytes=max(staged_bytes(form, rows, chunk, column_tiles=tiles), partial_bytes(tiles)),
    )


def _splits(blocks: int, input_tiles: int, multiprocessors: int) -> int:
    """Return by how many blocks to share inputs, so that multiprocessors have equal work and two blocks each.

    By arithmetic for an RTX 4090, 64 rows and four row tiles: an input tile takes 256 tensor-core products of 32 cycles
    on four units, 0.8 us. Sums are 32 KB, written and read, at 16 bytes a cycle. A launch takes 2.5 us.
    """

    def time(splits: int) -> float:
        turns = -(-blocks * splits // multiprocessors)
        alone = _ALONE if turns == 1 else 1.0
        if splits == 1:
            return alone * turns * input_tiles
        return alone * turns * (input_tiles / splits + _SUMS_TILES) + _LAUNCH_TILES

    return min(range(1, max(1, min(_MOST_SPLITS, input_tiles * TILE_INPUTS // _FIXED_CHUNK)) + 1), key=time)


def is_largest(column_tiles: int) -> bool:
    """Return whether a product is of the largest size, whose blocks stage a fixed number of inputs."""
    return column_tiles == _COLUMN_TILES[-1]


def warps_down(form: KernelForm, row_tiles: int, rows: int, multiprocessors: int, *, gated: bool = False) -> int:
    """Return how many row tiles a block takes: the more the fewer blocks read x, but every multiprocessor needs one.

    gated  a block takes gates and their ups
    """
    down = least_warps_down(form, rows, column_tiles=column_tiles_of(rows), gated=gated)
    load = _FULL_LOAD_OF_FEW if rows <= 8 else _FULL_LOAD
    while down < WARPS and row_tiles / (2 * down) >= load * multiprocessors:
        down *= 2
    return down


def least_warps_down(form: KernelForm, rows: int, *, column_tiles: int, gated: bool) -> int:
    """Return the fewest row tiles of a block whose inputs fit its shared memory."""
    down = 2 if gated else 1
    if is_largest(column_tiles):
        return max(down, WARPS * TILE_INPUTS // _FIXED_CHUNK)
    while staged_bytes(form, rows, staged_unit(down), column_tiles=column_tiles) > SHARED_BYTES:
        down *= 2
    return down


def staged_inputs(form: KernelForm, input_tiles: int, rows: int, down: int, *, column_tiles: int) -> int:
    """Return the inputs that a block stages at a time."""
    if is_largest(column_tiles):
        return _FIXED_CHUNK
    unit = staged_unit(down)
    chunk = -(-input_tiles * TILE_INPUTS // unit) * unit
    while chunk > unit and staged_bytes(form, rows, chunk, column_tiles=column_tiles) > _STAGED_BYTES:
        chunk -= unit
    return chunk


def staged_unit(down: int) -> int:
    """Return the inputs of one tile for each warp that shares a row tile."""
    return WARPS // down * TILE_INPUTS


def column_tiles_of(rows: int) -> int:
    """Return how many tiles of 8 rows a product takes."""
    return next(size for size in _COLUMN_TILES if 8 * size >= rows)


def staged_bytes(form: KernelForm, rows: int, chunk: int, *, column_tiles: int) -> int:
    """Return the shared memory of a block that stages ``chunk`` inputs of so many rows.

    The largest product has room for rows that are not there.
    """
    rows = 8 * column_tiles if is_largest(column_tiles) else rows
    sums = chunk // form.segment * 8 * column_tiles * 4 if form.offset == "added" else 0
    return form.table_bytes + rows * (2 * chunk + 32) + sums


def partial_bytes(column_tiles: int) -> int:
    """Return the shared memory of the warps' partial sums."""
    return WARPS * column_tiles * 4 * 32 * 4


def weight_struct(weight: TiledWeight) -> WeightStruct:
    """Return what the kernels read of a packed weight, which must stay where it is."""

    def address(tensor: Tensor | None) -> int | None:
        return None if tensor is None else tensor.data_ptr()

    return WeightStruct(
        low=address(weight.low),
        high=address(weight.high),
        scale=address(weight.scale),
        scale_base=address(weight.scale_base),
        offset=address(weight.offset),
        offset_base=address(weight.offset_base),
        zeros=address(weight.zeros),
        zero=weight.zero or 0,
        out_features=weight.out_features,
        in_features=weight.in_features,
        row_tiles=weight.row_tiles,
        input_tiles=weight.input_tiles,
        group_tiles=weight.group_tiles,
        spans=weight.spans,
    )


def wide_struct(weight: Tensor) -> WeightStruct:
    """Return what the kernels read of a bf16 weight [O, I], which must stay where it is."""
    rows, inputs = weight.shape
    return WeightStruct(
        low=weight.data_ptr(),
        out_features=rows,
        in_features=inputs,
        row_tiles=-(-rows // TILE_ROWS),
        input_tiles=-(-inputs // TILE_INPUTS),
    )
