"""LLVM code of a CPU step's small operations: norms, rotation with the write of keys and values, SwiGLU, attention.

All are float32. A decode step has hundreds of them, and as several of torch's operations each costs more than its work.

T rows, H hidden, Hq and Hkv heads, D head dim (a multiple of 8), V numbers of a head's output, L keys. A token has
2 Hkv entries, keys then values; or Hkv where a value is the first part of its key (``LayerHeads.entries``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from edgepipe_torch.cpu.frame import ATTRIBUTES
from edgepipe_torch.cpu.group_code import join_function
from edgepipe_torch.cpu.ir_text import Function, float_constant
from edgepipe_torch.cpu.ir_vectors import (
    EIGHT,
    EXP_LOW,
    LOWEST,
    exp,
    fma,
    larger,
    largest_of,
    repeated,
    shuffled,
    sum_of,
    vector_declarations,
)

ATTEND_JOB = (  # 64-bit fields of the argument of ``attend``
    "queries",  # [T, stride] float32
    "stride",  # floats between the rows of queries
    "out",  # [T, Hq V]
    "keys",  # a layer's pool [slots, entries, D]: float32, or int8 codes
    "scales",  # scales of codes: float16 [slots, entries]
    "sinks",  # [Hq] float32, or 0
    "rows",  # int64 [n, 4]: row of queries and out, first slot, address of slots int64 [L] or 0, L
    "items",  # n * Hq
    "heads",  # Hq
    "shared",  # Hq / Hkv
    "pitch",  # entries * D
    "scores",  # [threads, room]
    "room",  # floats: a whole number of vectors that is more than L, of codes for each of the heads that share keys
    "calls",  # addresses of GOMP_parallel, omp_get_thread_num, omp_get_num_threads
    "threads",
    "scale",  # bits of a float: factor on q k
)


def vector_module() -> str:
    """Return a module with ``normalise``, ``swiglu`` and ``join``."""
    return "\n".join(
        [_normalise(), _swiglu(), join_function(), "declare float @llvm.sqrt.f32(float)", *step_declarations()]
    )


def head_module(head_dim: int, value_width: int) -> str:
    """Return a module with ``rotate`` and ``attend`` for heads of ``head_dim``.

    ``value_width``: leading dimensions of a key that are its value; 0: values are apart.
    """
    items = _attend_items(head_dim, value_width)
    return "\n".join([_rotate(head_dim), items, *attend_functions(), *step_declarations()])


def step_declarations() -> list[str]:
    """Return what ends a module of functions that use vectors."""
    return [*vector_declarations(), ATTRIBUTES]


def _normalise() -> str:
    """Write ``normalise``: RMSNorm of ``outer`` x ``inner`` vectors of ``size`` floats; may be in place.

    ``pitch``: floats between outer vectors; ``epsilon``: bits of a float.
    """
    code = Function(
        "normalise",
        ["ptr %x", "ptr %weight", "ptr %out", "i64 %outer", "i64 %inner", "i64 %size", "i64 %pitch", "i64 %epsilon"],
    )
    count = code.value("sitofp i64 %size to float")
    epsilon = code.value(f"bitcast i32 {code.value('trunc i64 %epsilon to i32')} to float")

    def outer(index: str) -> None:
        start = code.mul(index, "%pitch")

        def inner(number: str) -> None:
            at = code.add(start, code.mul(number, "%size"))
            x, out = code.at("float", "%x", at), code.at("float", "%out", at)
            squares = code.variable(EIGHT, "zeroinitializer")

            def add(place: str) -> None:
                value = code.load(EIGHT, code.at("float", x, place))
                code.store(EIGHT, fma(code, value, value, code.load(EIGHT, squares)), squares)

            code.loop("0", "%size", add, step=8)
            mean = code.value(f"fdiv float {sum_of(code, code.load(EIGHT, squares))}, {count}")
            root = code.value(f"call float @llvm.sqrt.f32(float {code.value(f'fadd float {mean}, {epsilon}')})")
            factor = code.splat("float", code.value(f"fdiv float 1.0, {root}"), 8)

            def scale(place: str) -> None:
                value = code.value(f"fmul {EIGHT} {code.load(EIGHT, code.at('float', x, place))}, {factor}")
                weight = code.load(EIGHT, code.at("float", "%weight", place))
                code.store(EIGHT, code.value(f"fmul {EIGHT} {value}, {weight}"), code.at("float", out, place))

            code.loop("0", "%size", scale, step=8)

        code.loop("0", "%inner", inner)

    code.loop("0", "%outer", outer)
    return code.text()


def _swiglu() -> str:
    """Write ``swiglu``: silu(x[:, :size]) * x[:, size:] of x [rows, 2 size] into out [rows, size]."""
    code = Function("swiglu", ["ptr %x", "ptr noalias %out", "i64 %rows", "i64 %size"])

    def row(index: str) -> None:
        start = code.mul(index, "%size")
        gate = code.at("float", "%x", code.mul(start, 2))
        up, out = code.at("float", gate, "%size"), code.at("float", "%out", start)

        def eight(place: str) -> None:
            x = code.load(EIGHT, code.at("float", gate, place))
            grown = exp(code, code.value(f"fneg {EIGHT} {x}"))
            below = code.value(f"fadd {EIGHT} {grown}, {repeated(1.0)}")
            silu = code.value(f"fdiv {EIGHT} {x}, {below}")
            other = code.load(EIGHT, code.at("float", up, place))
            code.store(EIGHT, code.value(f"fmul {EIGHT} {silu}, {other}"), code.at("float", out, place))

        code.loop("0", "%size", eight, step=8)

    code.loop("0", "%rows", row)
    return code.text()


def _rotate(head_dim: int) -> str:
    """Write ``rotate``: rotate queries and keys of qkv [rows, (Hq + 2 Hkv) D] in place; write keys and values to slots.

    ``rotations`` [rows, D / 2] pairs (cosine, sine) for adjacent pairs of values.
    """
    code = Function(
        "rotate",
        [
            *("ptr %qkv", "ptr noalias %rotations", "ptr noalias %slots", "ptr noalias %pool"),
            *("i64 %rows", "i64 %heads", "i64 %kv_heads"),
        ],
    )
    size = code.mul(code.mul("%kv_heads", 2), head_dim)

    def store(_row: str, new: str, slot: str) -> None:
        target = code.at("float", "%pool", code.mul(slot, size))

        def copy(place: str) -> None:
            code.store(EIGHT, code.load(EIGHT, code.at("float", new, place)), code.at("float", target, place))

        code.loop("0", size, copy, step=8)

    rotate_rows(code, head_dim, store)
    return code.text()


def rotate_rows(code: Function, head_dim: int, store: Callable[[str, str, str], None]) -> None:
    """Write the loop over the rows of a function with the arguments of ``rotate``.

    ``store`` writes what stores a row's keys and values [2 Hkv, D] at an address to a slot.
    """
    total = code.add("%heads", code.mul("%kv_heads", 2))
    turned = code.add("%heads", "%kv_heads")
    evens, odds, swap = ([0, 0, 2, 2, 4, 4, 6, 6], [1, 1, 3, 3, 5, 5, 7, 7], [1, 0, 3, 2, 5, 4, 7, 6])
    signs = ", ".join(f"float {value}" for value in (-1.0, 1.0) * 4)

    def row(index: str) -> None:
        source = code.at("float", "%qkv", code.mul(code.mul(index, total), head_dim))
        turns = code.at("float", "%rotations", code.mul(index, head_dim))

        def head(number: str) -> None:
            start = code.at("float", source, code.mul(number, head_dim))
            for place in range(0, head_dim, 8):
                at = code.at("float", start, str(place))
                x = code.load(EIGHT, at)
                turn = code.load(EIGHT, code.at("float", turns, str(place)))
                cosines, sines = shuffled(code, turn, evens), shuffled(code, turn, odds)
                sines = code.value(f"fmul {EIGHT} {sines}, <{signs}>")
                side = code.value(f"fmul {EIGHT} {shuffled(code, x, swap)}, {sines}")
                code.store(EIGHT, fma(code, x, cosines, side), at)

        code.loop("0", turned, head)
        new = code.at("float", source, code.mul("%heads", head_dim))
        store(index, new, code.load("i64", code.at("i64", "%slots", index), align=8))

    code.loop("0", "%rows", row)


def _attend_items(head_dim: int, value_width: int) -> str:
    """Write ``attend_items``: (row, head) pairs [first, end), each with the scores [L] at ``scores``."""
    code = Function("attend_items", ["ptr %job", "i64 %first", "i64 %end", "ptr noalias %scores"], internal=True)
    field = job_fields(code)
    out_dim = value_width or head_dim
    chunks, value_chunks = range(0, head_dim, 8), range(0, out_dim, 8)
    scale = code.splat("float", float_field(code, field["scale"]), 8)

    def item(index: str) -> None:
        row = code.at("i64", field["rows"], code.mul(code.value(f"sdiv i64 {index}, {field['heads']}"), 4))
        head = code.value(f"srem i64 {index}, {field['heads']}")
        number, first, table, length = (code.load("i64", code.at("i64", row, str(n)), align=8) for n in range(4))
        slots = code.value(f"inttoptr i64 {table} to ptr")
        at = code.mul(head, head_dim)
        query = code.at("float", field["queries"], code.add(code.mul(number, field["stride"]), at))
        out_row = code.add(code.mul(number, field["heads"]), head)
        out = code.at("float", field["out"], code.mul(out_row, out_dim))
        kv_head = code.mul(code.value(f"sdiv i64 {head}, {field['shared']}"), head_dim)
        keys = code.at("float", field["keys"], kv_head)
        values = keys if value_width else code.at("float", keys, code.value(f"sdiv i64 {field['pitch']}, 2"))
        parts = [
            code.value(f"fmul {EIGHT} {code.load(EIGHT, code.at('float', query, str(place)))}, {scale}")
            for place in chunks
        ]
        scattered = code.value(f"icmp ne i64 {table}, 0")

        def position(key: str) -> str:
            """Return the floats from the pool's start to a key's slot."""
            slot = code.variable("i64")
            code.branch(
                scattered,
                lambda: code.store("i64", code.load("i64", code.at("i64", slots, key), align=8), slot),
                lambda: code.store("i64", code.add(first, key), slot),
            )
            return code.mul(code.load("i64", slot), field["pitch"])

        def score(key: str) -> None:
            base = code.at("float", keys, position(key))
            sums = ["zeroinitializer", "zeroinitializer"]
            for number, place in enumerate(chunks):
                loaded = code.load(EIGHT, code.at("float", base, str(place)))
                sums[number % 2] = fma(code, parts[number], loaded, sums[number % 2])
            found = sum_of(code, code.value(f"fadd {EIGHT} {sums[0]}, {sums[1]}"))
            code.store("float", found, code.at("float", "%scores", key))

        code.loop("0", length, score)
        code.loop(length, whole(code, length), lambda key: pad(code, "%scores", key))
        share = softmax(code, "%scores", length, sink_of(code, field, head))
        found = [code.variable(EIGHT, "zeroinitializer") for _ in value_chunks]

        def add(key: str) -> None:
            base = code.at("float", values, position(key))
            weight = code.splat("float", code.load("float", code.at("float", "%scores", key)), 8)
            for number, place in enumerate(value_chunks):
                loaded = code.load(EIGHT, code.at("float", base, str(place)))
                code.store(EIGHT, fma(code, weight, loaded, code.load(EIGHT, found[number])), found[number])

        code.loop("0", length, add)
        shares = code.splat("float", share, 8)
        for number, place in enumerate(value_chunks):
            value = code.value(f"fmul {EIGHT} {code.load(EIGHT, found[number])}, {shares}")
            code.store(EIGHT, value, code.at("float", out, str(place)))

    code.loop("%first", "%end", item)
    return code.text()


def whole(code: Function, length: str) -> str:
    """Round L up to a multiple of 8."""
    return code.mul(code.value(f"sdiv i64 {code.add(length, 7)}, 8"), 8)


def pad(code: Function, scores: str, key: str) -> None:
    """Write a score whose weight is zero."""
    code.store("float", float_constant(LOWEST), code.at("float", scores, key))


def float_field(code: Function, bits: str) -> str:
    """Return the float in the low half of a 64-bit field."""
    return code.value(f"bitcast i32 {code.value(f'trunc i64 {bits} to i32')} to float")


def sink_of(code: Function, field: Mapping[str, str], head: str) -> str:
    """Return the sink of a head; without sinks, a score whose weight is zero."""
    sink = code.variable("float")
    code.branch(
        code.is_null(field["sinks"]),
        lambda: code.store("float", float_constant(LOWEST), sink),
        lambda: code.store("float", code.load("float", code.at("float", field["sinks"], head)), sink),
    )
    return code.load("float", sink)


def softmax(code: Function, scores: str, length: str, sink: str) -> str:
    """Replace scores [whole(L)] by exp(score - largest); return 1 / the sum of these and of the sink's.

    A NaN makes the sum a NaN.
    """
    largest = code.variable(EIGHT, code.splat("float", sink, 8))

    def compare(key: str) -> None:
        at = code.at("float", scores, key)
        code.store(EIGHT, larger(code, code.load(EIGHT, largest), code.load(EIGHT, at)), largest)

    code.loop("0", length, compare, step=8)
    top = code.splat("float", largest_of(code, code.load(EIGHT, largest)), 8)

    def weight_of(score: str) -> str:
        below = code.value(f"fsub {EIGHT} {score}, {top}")
        weight = exp(code, below)
        inside = code.value(f"fcmp ogt {EIGHT} {below}, {repeated(EXP_LOW)}")
        weight = code.value(f"select <8 x i1> {inside}, {EIGHT} {weight}, {EIGHT} zeroinitializer")
        unknown = code.value(f"fcmp uno {EIGHT} {below}, {below}")
        return code.value(f"select <8 x i1> {unknown}, {EIGHT} {below}, {EIGHT} {weight}")

    def weigh(key: str) -> None:
        at = code.at("float", scores, key)
        weight = weight_of(code.load(EIGHT, at))
        code.store(EIGHT, weight, at)
        code.store(EIGHT, code.value(f"fadd {EIGHT} {code.load(EIGHT, total)}, {weight}"), total)

    alone = code.value(f"insertelement {EIGHT} {repeated(LOWEST)}, float {sink}, i32 0")
    total = code.variable(EIGHT, weight_of(alone))
    code.loop("0", length, weigh, step=8)
    return code.value(f"fdiv float 1.0, {sum_of(code, code.load(EIGHT, total))}")


def attend_functions() -> list[str]:
    """Return ``attend``: it gives the (row, head) pairs of a job to ``attend_items``, shared out among threads.

    ``attend_items(job, first, end, scores)`` attends for the pairs [first, end); ``scores``: the thread's room.
    """
    return [_attend_team(), _attend()]


def _attend_team() -> str:
    """Write what every thread of a team runs."""
    code = Function("attend_team", ["ptr %job"], internal=True)
    field = job_fields(code)
    found = [
        code.value(f"call i32 {code.load('ptr', code.at('i64', field['calls'], str(index)), align=8)}()")
        for index in (1, 2)
    ]
    thread, count = (code.value(f"sext i32 {each} to i64") for each in found)
    first = code.value(f"sdiv i64 {code.mul(field['items'], thread)}, {count}")
    end = code.value(f"sdiv i64 {code.mul(field['items'], code.add(thread, 1))}, {count}")
    scores = code.at("float", field["scores"], code.mul(thread, field["room"]))
    code.do(f"call void @attend_items(ptr %job, i64 {first}, i64 {end}, ptr {scores})")
    return code.text()


def _attend() -> str:
    """Write ``attend``: single queries of several sequences, each with its keys and values in the pool."""
    code = Function("attend", ["ptr %job"])
    field = job_fields(code)
    alone = code.value(f"icmp sle i64 {field['threads']}, 1")

    def team() -> None:
        parallel = code.load("ptr", field["calls"], align=8)
        count = code.value(f"trunc i64 {field['threads']} to i32")
        code.do(f"call void {parallel}(ptr @attend_team, ptr %job, i32 {count}, i32 0)")

    code.branch(
        alone,
        lambda: code.do(f"call void @attend_items(ptr %job, i64 0, i64 {field['items']}, ptr {field['scores']})"),
        team,
    )
    return code.text()


def job_fields(code: Function) -> dict[str, str]:
    """Read the fields of ``%job``; see ``ATTEND_JOB``."""
    addresses = ("queries", "out", "keys", "scales", "sinks", "rows", "scores", "calls")
    return {
        name: code.load("ptr" if name in addresses else "i64", code.at("i64", "%job", str(index)), align=8)
        for index, name in enumerate(ATTEND_JOB)
    }
