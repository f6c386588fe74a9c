"""LLVM code of a CPU step's small operations: norms, rotation with the write of keys and values, SwiGLU, attention.

All are float32. A decode step has hundreds of them, and as several of torch's operations each costs more than its work.

T rows, H hidden, Hq and Hkv heads, D head dim (a multiple of 8), L keys.
"""

from __future__ import annotations

from edgepipe_torch.cpu_code import ATTRIBUTES, fma_declaration
from edgepipe_torch.ir_text import Function, float_constant

_EIGHT = "<8 x float>"
_INTS = "<8 x i32>"

# exp: Cephes' expf (Moshier, cephes/single/expf.c): 2**n * (1 + r + r**2 * polynomial(r)), r = x - n * ln 2
_EXP_LOW, _EXP_HIGH = -87.3, 88.3
_LOG2E, _LN2_HIGH, _LN2_LOW = 1.44269504088896341, 0.693359375, -2.12194440e-4
_EXP_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)

ATTEND_JOB = (  # 64-bit fields of the argument of ``attend``
    "queries",  # [T, stride] float32
    "stride",  # floats between the rows of queries
    "out",  # [T, Hq D]
    "keys",  # a layer's pool [slots, 2 Hkv, D]
    "rows",  # int64 [n, 4]: row of queries and out, first slot, address of slots int64 [L] or 0, L
    "items",  # n * Hq
    "heads",  # Hq
    "shared",  # Hq / Hkv
    "pitch",  # 2 Hkv D
    "scores",  # [threads, longest L]
    "longest",
    "calls",  # addresses of GOMP_parallel, omp_get_thread_num, omp_get_num_threads
    "threads",
)


def vector_module() -> str:
    """Return a module with ``normalise`` and ``swiglu``."""
    return "\n".join([_normalise(), _swiglu(), "declare float @llvm.sqrt.f32(float)", *_declarations()])


def head_module(head_dim: int) -> str:
    """Return a module with ``rotate`` and ``attend`` for heads of ``head_dim``."""
    parts = [_rotate(head_dim), _attend_items(head_dim), _attend_team(), _attend()]
    return "\n".join([*parts, "declare float @llvm.maxnum.f32(float, float)", *_declarations()])


def _declarations() -> list[str]:
    two = f"{_EIGHT}, {_EIGHT}"
    return [
        f"declare {_EIGHT} @llvm.maxnum.v8f32({two})",
        f"declare {_EIGHT} @llvm.minnum.v8f32({two})",
        f"declare {_EIGHT} @llvm.nearbyint.v8f32({_EIGHT})",
        f"declare float @llvm.vector.reduce.fadd.v8f32(float, {_EIGHT})",
        fma_declaration(8),
        ATTRIBUTES,
    ]


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
            squares = code.variable(_EIGHT, "zeroinitializer")

            def add(place: str) -> None:
                value = code.load(_EIGHT, code.at("float", x, place))
                code.store(_EIGHT, _fma(code, value, value, code.load(_EIGHT, squares)), squares)

            code.loop("0", "%size", add, step=8)
            mean = code.value(f"fdiv float {_sum(code, code.load(_EIGHT, squares))}, {count}")
            root = code.value(f"call float @llvm.sqrt.f32(float {code.value(f'fadd float {mean}, {epsilon}')})")
            factor = code.splat("float", code.value(f"fdiv float 1.0, {root}"), 8)

            def scale(place: str) -> None:
                value = code.value(f"fmul {_EIGHT} {code.load(_EIGHT, code.at('float', x, place))}, {factor}")
                weight = code.load(_EIGHT, code.at("float", "%weight", place))
                code.store(_EIGHT, code.value(f"fmul {_EIGHT} {value}, {weight}"), code.at("float", out, place))

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
            x = code.load(_EIGHT, code.at("float", gate, place))
            grown = _exp(code, code.value(f"fneg {_EIGHT} {x}"))
            below = code.value(f"fadd {_EIGHT} {grown}, {_all(1.0)}")
            silu = code.value(f"fdiv {_EIGHT} {x}, {below}")
            other = code.load(_EIGHT, code.at("float", up, place))
            code.store(_EIGHT, code.value(f"fmul {_EIGHT} {silu}, {other}"), code.at("float", out, place))

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
    both = code.mul("%kv_heads", 2)
    total = code.add("%heads", both)
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
                x = code.load(_EIGHT, at)
                turn = code.load(_EIGHT, code.at("float", turns, str(place)))
                cosines, sines = _shuffled(code, turn, evens), _shuffled(code, turn, odds)
                sines = code.value(f"fmul {_EIGHT} {sines}, <{signs}>")
                side = code.value(f"fmul {_EIGHT} {_shuffled(code, x, swap)}, {sines}")
                code.store(_EIGHT, _fma(code, x, cosines, side), at)

        code.loop("0", turned, head)
        slot = code.load("i64", code.at("i64", "%slots", index), align=8)
        target = code.at("float", "%pool", code.mul(code.mul(slot, both), head_dim))
        new = code.at("float", source, code.mul("%heads", head_dim))

        def copy(place: str) -> None:
            code.store(_EIGHT, code.load(_EIGHT, code.at("float", new, place)), code.at("float", target, place))

        code.loop("0", code.mul(both, head_dim), copy, step=8)

    code.loop("0", "%rows", row)
    return code.text()


def _attend_items(head_dim: int) -> str:
    """Write ``attend_items``: (row, head) pairs [first, end), each with the scores [L] at ``scores``."""
    code = Function("attend_items", ["ptr %job", "i64 %first", "i64 %end", "ptr noalias %scores"], internal=True)
    field = _job(code)
    chunks = range(0, head_dim, 8)
    scale = code.splat("float", float_constant(head_dim**-0.5), 8)

    def item(index: str) -> None:
        row = code.at("i64", field["rows"], code.mul(code.value(f"sdiv i64 {index}, {field['heads']}"), 4))
        head = code.value(f"srem i64 {index}, {field['heads']}")
        number, first, table, length = (code.load("i64", code.at("i64", row, str(n)), align=8) for n in range(4))
        slots = code.value(f"inttoptr i64 {table} to ptr")
        at = code.mul(head, head_dim)
        query = code.at("float", field["queries"], code.add(code.mul(number, field["stride"]), at))
        out = code.at("float", field["out"], code.add(code.mul(code.mul(number, field["heads"]), head_dim), at))
        kv_head = code.mul(code.value(f"sdiv i64 {head}, {field['shared']}"), head_dim)
        keys = code.at("float", field["keys"], kv_head)
        values = code.at("float", keys, code.value(f"sdiv i64 {field['pitch']}, 2"))
        parts = [
            code.value(f"fmul {_EIGHT} {code.load(_EIGHT, code.at('float', query, str(place)))}, {scale}")
            for place in chunks
        ]
        scattered = code.value(f"icmp ne i64 {table}, 0")
        largest = code.variable("float", float_constant(-3.0e38))

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
                loaded = code.load(_EIGHT, code.at("float", base, str(place)))
                sums[number % 2] = _fma(code, parts[number], loaded, sums[number % 2])
            found = _sum(code, code.value(f"fadd {_EIGHT} {sums[0]}, {sums[1]}"))
            code.store("float", found, code.at("float", "%scores", key))
            before = code.load("float", largest)
            code.store("float", code.value(f"call float @llvm.maxnum.f32(float {before}, float {found})"), largest)

        code.loop("0", length, score)
        top = code.splat("float", code.load("float", largest), 8)
        rest = code.value(f"srem i64 {length}, 8")  # pad to whole vectors with scores whose weight is zero
        padded = code.value(f"sub i64 {code.add(length, 8)}, {rest}")
        code.loop(
            length, padded, lambda key: code.store("float", float_constant(-3.0e38), code.at("float", "%scores", key))
        )
        total = code.variable(_EIGHT, "zeroinitializer")

        def weigh(key: str) -> None:
            at = code.at("float", "%scores", key)
            below = code.value(f"fsub {_EIGHT} {code.load(_EIGHT, at)}, {top}")
            weight = _exp(code, below)
            inside = code.value(f"fcmp ogt {_EIGHT} {below}, {_all(_EXP_LOW)}")
            weight = code.value(f"select <8 x i1> {inside}, {_EIGHT} {weight}, {_EIGHT} zeroinitializer")
            code.store(_EIGHT, weight, at)
            code.store(_EIGHT, code.value(f"fadd {_EIGHT} {code.load(_EIGHT, total)}, {weight}"), total)

        code.loop("0", padded, weigh, step=8)
        share = code.value(f"fdiv float 1.0, {_sum(code, code.load(_EIGHT, total))}")
        found = [code.variable(_EIGHT, "zeroinitializer") for _ in chunks]

        def add(key: str) -> None:
            base = code.at("float", values, position(key))
            weight = code.splat("float", code.load("float", code.at("float", "%scores", key)), 8)
            for number, place in enumerate(chunks):
                loaded = code.load(_EIGHT, code.at("float", base, str(place)))
                code.store(_EIGHT, _fma(code, weight, loaded, code.load(_EIGHT, found[number])), found[number])

        code.loop("0", length, add)
        shares = code.splat("float", share, 8)
        for number, place in enumerate(chunks):
            value = code.value(f"fmul {_EIGHT} {code.load(_EIGHT, found[number])}, {shares}")
            code.store(_EIGHT, value, code.at("float", out, str(place)))

    code.loop("%first", "%end", item)
    return code.text()


def _attend_team() -> str:
    """Write what every thread of a team runs."""
    code = Function("attend_team", ["ptr %job"], internal=True)
    field = _job(code)
    found = [
        code.value(f"call i32 {code.load('ptr', code.at('i64', field['calls'], str(index)), align=8)}()")
        for index in (1, 2)
    ]
    thread, count = (code.value(f"sext i32 {each} to i64") for each in found)
    first = code.value(f"sdiv i64 {code.mul(field['items'], thread)}, {count}")
    end = code.value(f"sdiv i64 {code.mul(field['items'], code.add(thread, 1))}, {count}")
    scores = code.at("float", field["scores"], code.mul(thread, field["longest"]))
    code.do(f"call void @attend_items(ptr %job, i64 {first}, i64 {end}, ptr {scores})")
    return code.text()


def _attend() -> str:
    """Write ``attend``: single queries of several sequences, each with its keys and values in the pool."""
    code = Function("attend", ["ptr %job"])
    field = _job(code)
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


def _job(code: Function) -> dict[str, str]:
    addresses = ("queries", "out", "keys", "rows", "scores", "calls")
    return {
        name: code.load("ptr" if name in addresses else "i64", code.at("i64", "%job", str(index)), align=8)
        for index, name in enumerate(ATTEND_JOB)
    }


def _exp(code: Function, x: str) -> str:
    """Return exp of 8 floats, within 2 units of the last place; below -87.3 about 1e-38."""
    low = code.value(f"call {_EIGHT} @llvm.maxnum.v8f32({_EIGHT} {x}, {_EIGHT} {_all(_EXP_LOW)})")
    x = code.value(f"call {_EIGHT} @llvm.minnum.v8f32({_EIGHT} {low}, {_EIGHT} {_all(_EXP_HIGH)})")
    power = code.value(f"fmul {_EIGHT} {x}, {_all(_LOG2E)}")
    power = code.value(f"call {_EIGHT} @llvm.nearbyint.v8f32({_EIGHT} {power})")
    rest = _fma(code, power, _all(-_LN2_HIGH), x)
    rest = _fma(code, power, _all(-_LN2_LOW), rest)
    found = _all(_EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        found = _fma(code, found, rest, _all(term))
    square = code.value(f"fmul {_EIGHT} {rest}, {rest}")
    found = _fma(code, found, square, code.value(f"fadd {_EIGHT} {rest}, {_all(1.0)}"))
    bits = code.value(f"fptosi {_EIGHT} {power} to {_INTS}")
    bits = code.value(f"shl {_INTS} {bits}, <{', '.join(['i32 23'] * 8)}>")
    grown = code.value(f"add {_INTS} {code.value(f'bitcast {_EIGHT} {found} to {_INTS}')}, {bits}")
    return code.value(f"bitcast {_INTS} {grown} to {_EIGHT}")


def _sum(code: Function, vector: str) -> str:
    return code.value(f"call reassoc float @llvm.vector.reduce.fadd.v8f32(float 0.0, {_EIGHT} {vector})")


def _fma(code: Function, a: str, b: str, c: str) -> str:
    return code.value(f"call {_EIGHT} @llvm.fma.v8f32({_EIGHT} {a}, {_EIGHT} {b}, {_EIGHT} {c})")


def _shuffled(code: Function, vector: str, lanes: list[int]) -> str:
    chosen = ", ".join(f"i32 {lane}" for lane in lanes)
    return code.value(f"shufflevector {_EIGHT} {vector}, {_EIGHT} poison, <8 x i32> <{chosen}>")


def _all(value: float) -> str:
    return "<" + ", ".join([f"float {float_constant(value)}"] * 8) + ">"
