"""LLVM code for KV as codes: rotation with the write of codes, and attention that reads them. Code of 8 bits.

All heads of a query that share keys attend together, so that codes are widened once for them, 8 keys at a time.

T rows, Hq and Hkv heads, D head dim (a multiple of 8), L keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from edgepipe_torch.cpu.ir_text import Function, float_constant
from edgepipe_torch.cpu.ir_vectors import (
    EIGHT,
    INTS,
    fma,
    larger,
    largest_of,
    nearest,
    repeated,
    smaller,
    sum_of,
    sums_of,
)
from edgepipe_torch.cpu.step_code import (
    attend_functions,
    float_field,
    job_fields,
    pad,
    rotate_rows,
    sink_of,
    softmax,
    step_declarations,
    whole,
)
from edgepipe_torch.layers.kv_codes import HIGHEST_CODE, LEAST_SCALE, SCALE_FACTOR

_KEYS = 8  # keys that one turn of a loop takes
_SUMS = 8  # vectors of an output that registers hold


class CodeForm(Protocol):
    """How code reads and writes one form of KV, for heads of one size."""

    head_dim: int
    code_bytes: int  # bytes of a vector's codes
    scale_type: str
    num_scales: int  # scales of a vector
    has_rests: bool  # the lower bits of a row's newest keys are kept apart, in slots that the row names

    def functions(self) -> list[str]:
        """Return what a module needs beside ``rotate`` and ``attend``."""
        ...

    def encode(self, code: Function, source: str, codes: str, scales: str, rests: str) -> None:
        """Write the codes and scales of D floats, and their lower bits if the form has them."""
        ...

    def widen(self, code: Function, codes: Sequence[str], scales: Sequence[str], wide: str, size: int) -> str | None:
        """Write the first ``size`` values of 8 vectors to ``wide`` [8, size]; return their factors, or None."""
        ...

    def widen_one(
        self, code: Function, codes: str, scales: str, rests: str, is_whole: str, wide: str, size: int
    ) -> None:
        """Write the first ``size`` values of a vector to ``wide``; without its lower bits if not ``is_whole`` (i1).

        Only forms that have rests do this.
        """
        ...

    def turn(self, code: Function, vector: str, size: int) -> None:
        """Rotate ``size`` floats in place; see ``KVCodes.turned``."""
        ...


def code_module(form: CodeForm, value_width: int) -> str:
    """Return a module with ``rotate`` and ``attend`` for a form of KV; see ``head_module``. Queries change.

    A form that has rests has ``keep``, too, and two more numbers for each row of a job: the address of the slots of the
    lower bits of its last keys, and how many these are (one at least).
    """
    parts = [*form.functions(), _rotate(form), _attend_items(form, value_width), *attend_functions()]
    if form.has_rests:
        parts.append(_keep())
    ends = ["declare i64 @llvm.smax.i64(i64, i64)", "declare i64 @llvm.smin.i64(i64, i64)"]
    return "\n".join([*parts, *ends, f"declare {EIGHT} @llvm.fabs.v8f32({EIGHT})", *step_declarations()])


class EightBitCode:
    """See ``kv_codes.EightBits``."""

    scale_type = "half"
    num_scales = 1
    has_rests = False

    def __init__(self, head_dim: int) -> None:
        self.head_dim = self.code_bytes = head_dim

    def functions(self) -> list[str]:
        return []

    def encode(self, code: Function, source: str, codes: str, scales: str, rests: str) -> None:
        scale = _scale(code, source, self.head_dim)
        code.store("half", scale, scales, align=2)
        wide = code.splat("float", code.value(f"fpext half {scale} to float"), 8)
        for place in range(0, self.head_dim, 8):
            value = code.load(EIGHT, code.at("float", source, str(place)))
            value = nearest(code, code.value(f"fdiv {EIGHT} {value}, {wide}"))
            # NaNs have no code; they become the lowest.
            value = smaller(code, larger(code, value, repeated(-HIGHEST_CODE)), repeated(HIGHEST_CODE))
            whole = code.value(f"fptosi {EIGHT} {value} to {INTS}")
            narrow = code.value(f"trunc {INTS} {whole} to <8 x i8>")
            code.store("<8 x i8>", narrow, code.at("i8", codes, str(place)), align=1)

    def widen(self, code: Function, codes: Sequence[str], scales: Sequence[str], wide: str, size: int) -> str | None:
        for number, source in enumerate(codes):
            for start in range(0, size, 8):
                found = code.load("<8 x i8>", code.at("i8", source, str(start)), align=1)
                whole = code.value(f"sext <8 x i8> {found} to {INTS}")
                value = code.value(f"sitofp {INTS} {whole} to {EIGHT}")
                code.store(EIGHT, value, code.at("float", wide, str(number * size + start)), align=32)
        halves = "poison"
        for number, place in enumerate(scales):
            scale = code.load("half", place, align=2)
            halves = code.value(f"insertelement <8 x half> {halves}, half {scale}, i32 {number}")
        return code.value(f"fpext <8 x half> {halves} to {EIGHT}")

    def widen_one(
        self, code: Function, codes: str, scales: str, rests: str, is_whole: str, wide: str, size: int
    ) -> None:
        raise NotImplementedError

    def turn(self, code: Function, vector: str, size: int) -> None:
        pass


def _rotate(form: CodeForm) -> str:
    """Write ``rotate``: as for float KV, but write codes and scales, and to ``rests`` [rows, entries] lower bits."""
    code = Function(
        "rotate",
        [
            *("ptr %qkv", "ptr noalias %rotations", "ptr noalias %slots", "ptr noalias %codes", "ptr noalias %scales"),
            *("ptr noalias %rests", "i64 %rows", "i64 %heads", "i64 %kv_heads"),
        ],
    )
    both = code.mul("%kv_heads", 2)

    def store(row: str, new: str, slot: str) -> None:
        first, own = code.mul(slot, both), code.mul(row, both)

        def head(number: str) -> None:
            at = code.add(first, number)
            source = code.at("float", new, code.mul(number, form.head_dim))
            codes = code.at("i8", "%codes", code.mul(at, form.code_bytes))
            scales = code.at(form.scale_type, "%scales", code.mul(at, form.num_scales))
            rests = code.at("i8", "%rests", code.mul(code.add(own, number), form.code_bytes))
            form.encode(code, source, codes, scales, rests)

        code.loop("0", both, head)

    rotate_rows(code, form.head_dim, store)
    return code.text()


def _keep() -> str:
    """Write ``keep``: copy ``bytes`` at each of ``tokens`` [count] of ``rests`` to ``slots`` [count] of ``codes``."""
    places = "ptr noalias %codes", "ptr noalias %rests", "ptr noalias %tokens", "ptr noalias %slots"
    code = Function("keep", [*places, "i64 %count", "i64 %bytes"])

    def one(index: str) -> None:
        token = code.load("i64", code.at("i64", "%tokens", index), align=8)
        slot = code.load("i64", code.at("i64", "%slots", index), align=8)
        source = code.at("i8", "%rests", code.mul(token, "%bytes"))
        target = code.at("i8", "%codes", code.mul(slot, "%bytes"))

        def eight(place: str) -> None:
            found = code.load("<8 x i8>", code.at("i8", source, place), align=1)
            code.store("<8 x i8>", found, code.at("i8", target, place), align=1)

        code.loop("0", "%bytes", eight, step=8)

    code.loop("0", "%count", one)
    return code.text()


def _scale(code: Function, source: str, head_dim: int) -> str:
    """Return the scale (half) of D values; NaN if one of them is a NaN or infinite, or too large."""
    highest, unknown = repeated(0.0), repeated(0.0)
    for place in range(0, head_dim, 8):
        value = code.load(EIGHT, code.at("float", source, str(place)))
        highest = larger(code, highest, code.value(f"call {EIGHT} @llvm.fabs.v8f32({EIGHT} {value})"))
        unknown = fma(code, value, repeated(0.0), unknown)
    scale = code.value(f"fmul float {largest_of(code, highest)}, {float_constant(SCALE_FACTOR)}")
    scale = code.value(f"fadd float {scale}, {float_constant(LEAST_SCALE)}")
    scale = code.value(f"fadd float {scale}, {sum_of(code, unknown)}")
    scale = code.value(f"fptrunc float {scale} to half")
    return code.value(f"fadd half {scale}, {code.value(f'fsub half {scale}, {scale}')}")


def _attend_items(form: CodeForm, value_width: int) -> str:
    """Write ``attend_items``; the scores of the heads that share keys lie one after the other."""
    head_dim = form.head_dim
    code = Function("attend_items", ["ptr %job", "i64 %first", "i64 %end", "ptr noalias %scores"], internal=True)
    field = job_fields(code)
    kv_heads = code.value(f"sdiv i64 {field['heads']}, {field['shared']}")
    out_dim = value_width or head_dim
    entries = kv_heads if value_width else code.mul(kv_heads, 2)
    scale_pitch = code.mul(entries, form.num_scales)
    wide = code.variable(f"[{_KEYS * head_dim} x float]")
    weights = code.variable(EIGHT)
    scale = code.splat("float", float_field(code, field["scale"]), 8)

    def group(index: str) -> None:
        row_index = code.value(f"sdiv i64 {index}, {kv_heads}")
        kv_head = code.value(f"srem i64 {index}, {kv_heads}")
        row = code.at("i64", field["rows"], code.mul(row_index, row_fields(form.has_rests)))
        number, start, table, length = (code.load("i64", code.at("i64", row, str(n)), align=8) for n in range(4))
        rests = _Rests(code, row, length) if form.has_rests else None
        begin = code.mul(index, field["shared"])
        low = code.value(f"call i64 @llvm.smax.i64(i64 %first, i64 {begin})")
        high = code.value(f"call i64 @llvm.smin.i64(i64 %end, i64 {code.add(begin, field['shared'])})")
        count = code.value(f"sub i64 {high}, {low}")
        head = code.value(f"sub i64 {low}, {code.mul(row_index, field['heads'])}")
        at = code.mul(head, head_dim)
        query = code.at("float", field["queries"], code.add(code.mul(number, field["stride"]), at))
        out_row = code.add(code.mul(number, field["heads"]), head)
        out = code.at("float", field["out"], code.mul(out_row, out_dim))
        keys = code.at("i8", field["keys"], code.mul(kv_head, form.code_bytes))
        values = keys if value_width else code.at("i8", keys, code.mul(kv_heads, form.code_bytes))
        key_scales = code.at(form.scale_type, field["scales"], code.mul(kv_head, form.num_scales))
        value_scales = key_scales
        if not value_width:
            value_scales = code.at(form.scale_type, key_scales, code.mul(kv_heads, form.num_scales))
        padded = whole(code, length)
        slots = _Slots(code, start=start, table=table, length=length)

        def scores_of(number: str) -> str:
            return code.at("float", "%scores", code.mul(number, padded))

        def query_of(number: str) -> str:
            return code.at("float", query, code.mul(number, head_dim))

        def out_of(number: str) -> str:
            return code.at("float", out, code.mul(number, out_dim))

        def widen(key: str, codes: str, scales: str, size: int) -> str | None:
            if (newest := rests) is None:
                return widen_upper(key, codes, scales, size)

            def upper() -> None:
                widen_upper(key, codes, scales, size)

            def each() -> None:
                code.loop("0", str(_KEYS), lambda number: widen_one(newest, key, number, codes, scales, size))

            code.branch(code.value(f"icmp sle i64 {code.add(key, _KEYS)}, {newest.first}"), upper, each)
            return None

        def widen_one(rests: _Rests, key: str, number: str, codes: str, scales: str, size: int) -> None:
            place, slot = slots.one(code.add(key, number))
            lower = code.at("i8", codes, code.mul(rests.slot(place), field["pitch"]))
            form.widen_one(
                code,
                code.at("i8", codes, code.mul(slot, field["pitch"])),
                code.at(form.scale_type, scales, code.mul(slot, scale_pitch)),
                lower,
                code.value(f"icmp sge i64 {place}, {rests.first}"),
                code.at("float", wide, code.mul(number, size)),
                size,
            )

        def widen_upper(key: str, codes: str, scales: str, size: int) -> str | None:
            places = slots.of(key)
            each = [code.at("i8", codes, code.mul(place, field["pitch"])) for place in places]
            theirs = [code.at(form.scale_type, scales, code.mul(place, scale_pitch)) for place in places]
            return form.widen(code, each, theirs, wide, size)

        def score(key: str) -> None:
            own = widen(key, keys, key_scales, head_dim)
            factors = scale if own is None else code.value(f"fmul {EIGHT} {own}, {scale}")

            def head(number: str) -> None:
                sums = _products(code, query_of(number), wide, head_dim)
                found = code.value(f"fmul {EIGHT} {sums_of(code, sums)}, {factors}")
                code.store(EIGHT, found, code.at("float", scores_of(number), key))

            code.loop("0", count, head)

        def weigh(number: str) -> None:
            scores = scores_of(number)
            code.loop(length, padded, lambda key: pad(code, scores, key))
            sink = sink_of(code, field, code.add(head, number))
            share = code.splat("float", softmax(code, scores, length, sink), 8)

            def divide(key: str) -> None:
                at = code.at("float", scores, key)
                code.store(EIGHT, code.value(f"fmul {EIGHT} {code.load(EIGHT, at)}, {share}"), at)

            code.loop("0", length, divide, step=_KEYS)
            for place in range(0, out_dim, 8):
                at = code.at("float", out_of(number), str(place))
                code.store(EIGHT, "zeroinitializer", at)

        def add(key: str) -> None:
            factors = widen(key, values, value_scales, out_dim)

            def head(number: str) -> None:
                weight = code.load(EIGHT, code.at("float", scores_of(number), key))
                if factors is not None:
                    weight = code.value(f"fmul {EIGHT} {weight}, {factors}")
                code.store(EIGHT, weight, weights)
                _add_values(code, out_of(number), weights, wide, out_dim)

            code.loop("0", count, head)

        code.loop("0", count, lambda number: form.turn(code, query_of(number), head_dim))
        code.loop("0", length, score, step=_KEYS)
        code.loop("0", count, weigh)
        code.loop("0", length, add, step=_KEYS)
        code.loop("0", count, lambda number: form.turn(code, out_of(number), out_dim))

    begun = code.value(f"sdiv i64 %first, {field['shared']}")
    last = code.value(f"sdiv i64 {code.value('sub i64 %end, 1')}, {field['shared']}")
    some = code.value("icmp slt i64 %first, %end")
    code.branch(some, lambda: code.loop(begun, code.add(last, 1), group))
    return code.text()


def row_fields(has_rests: bool) -> int:
    """Return how many numbers a job has for each row."""
    return 6 if has_rests else 4


class _Rests:
    """Slots of the lower bits of a row's last keys."""

    def __init__(self, code: Function, row: str, length: str) -> None:
        table, count = (code.load("i64", code.at("i64", row, str(n)), align=8) for n in (4, 5))
        self._code = code
        self._table = code.value(f"inttoptr i64 {table} to ptr")
        self.first = code.value(f"sub i64 {length}, {count}")

    def slot(self, key: str) -> str:
        """Return the slot of a key's lower bits; of a key that has none, that of another key."""
        code = self._code
        index = code.value(f"call i64 @llvm.smax.i64(i64 {code.value(f'sub i64 {key}, {self.first}')}, i64 0)")
        return code.load("i64", code.at("i64", self._table, index), align=8)


class _Slots:
    """Slots of a row's keys, by runs or by a table."""

    def __init__(self, code: Function, *, start: str, table: str, length: str) -> None:
        self._code = code
        self._start = start
        self._table = code.value(f"inttoptr i64 {table} to ptr")
        self._scattered = code.value(f"icmp ne i64 {table}, 0")
        self._last = code.value(f"sub i64 {length}, 1")

    def one(self, key: str) -> tuple[str, str]:
        """Return a key, at most the last, and its slot."""
        code = self._code
        place = code.value(f"call i64 @llvm.smin.i64(i64 {key}, i64 {self._last})")
        slot = code.variable("i64")
        code.branch(
            self._scattered,
            lambda: code.store("i64", code.load("i64", code.at("i64", self._table, place), align=8), slot),
            lambda: code.store("i64", code.add(self._start, place), slot),
        )
        return place, code.load("i64", slot)

    def of(self, key: str) -> list[str]:
        """Return the slots of a key and those after it; the last key's for keys beyond it."""
        code = self._code
        found = [code.variable("i64") for _ in range(_KEYS)]
        keys = [
            code.value(f"call i64 @llvm.smin.i64(i64 {code.add(key, number)}, i64 {self._last})")
            for number in range(_KEYS)
        ]

        def by_table() -> None:
            for each, slot in zip(keys, found, strict=True):
                code.store("i64", code.load("i64", code.at("i64", self._table, each), align=8), slot)

        def by_run() -> None:
            for each, slot in zip(keys, found, strict=True):
                code.store("i64", code.add(self._start, each), slot)

        code.branch(self._scattered, by_table, by_run)
        return [code.load("i64", slot) for slot in found]


def _products(code: Function, query: str, wide: str, head_dim: int) -> list[str]:
    """Return for each of 8 keys a vector whose sum is its product with a query."""
    sums = ["zeroinitializer"] * _KEYS
    for start in range(0, head_dim, 8):
        part = code.load(EIGHT, code.at("float", query, str(start)))
        for number in range(_KEYS):
            key = code.load(EIGHT, code.at("float", wide, str(number * head_dim + start)), align=32)
            sums[number] = fma(code, part, key, sums[number])
    return sums


def _add_values(code: Function, out: str, weights: str, wide: str, head_dim: int) -> None:
    """Add 8 keys' values, each times its weight, to an output [D]."""
    every = range(0, head_dim, 8)
    for first in range(0, len(every), _SUMS):
        starts = every[first : first + _SUMS]
        places = [code.at("float", out, str(start)) for start in starts]
        sums = [code.load(EIGHT, place) for place in places]
        for number in range(_KEYS):
            weight = code.splat("float", code.load("float", code.at("float", weights, str(number))), 8)
            for index, start in enumerate(starts):
                value = code.load(EIGHT, code.at("float", wide, str(number * head_dim + start)), align=32)
                sums[index] = fma(code, weight, value, sums[index])
        for place, total in zip(places, sums, strict=True):
            code.store(EIGHT, total, place)
