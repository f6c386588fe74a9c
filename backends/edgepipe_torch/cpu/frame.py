"""LLVM code around the CPU's products: threads that share the tiles, prepared inputs, and recorded calls."""

from __future__ import annotations

from collections.abc import Sequence

from edgepipe_torch.cpu.ir_text import Function
from edgepipe_torch.cpu.kinds import SUM_FACTOR, TILE

SEGMENT = (  # 64-bit fields of a part of a product, in order
    "next",  # the next segment, or 0
    "work",  # function of the kind
    "slot",  # slot that holds the prepared inputs
    "prepare",  # function that prepares the slot; 0 if a segment before this one does
    "order",  # int32 [I], or 0
    "low",
    "high",
    "scale",
    "offset",
    "bias",  # float32 [tiles * 16], or 0
    "factors",  # float32 [20]: of the inputs i % 16, of the groups' sums, of the scale; the codes' zero; of offsets
    "inputs",
    "groups",
    "blocks",  # blocks of 8 inputs in a group
    "outputs",
    "column",  # place of the first output
)
SUM_WORDS = 4  # words of sums behind the prepared inputs, at most, for each group and row
CALL_FIELDS = 11  # fields of a recorded call: the function's address and its arguments
ATTRIBUTES = 'attributes #0 = { nounwind "min-legal-vector-width"="512" }\n'


def frame_module(more: Sequence[str] = ()) -> str:
    """Return the module with ``multiply``, which prepares inputs and shares tiles among threads, and ``replay``.

    ``more``: functions that call ``prepare_chain`` and ``share``.
    """
    own = [_multiply(), _team(), _share(), _prepare_chain(), _prepare(), _replay()]
    return "\n".join([*own, *more, ATTRIBUTES])


def _multiply() -> str:
    """Write ``multiply``: x [rows, I] times all segments into out, whose rows are ``stride`` floats apart.

    ``scratch``: ``num_slots * rows * slot`` floats, slot = I + SUM_WORDS * the most groups. ``calls``: addresses of
    GOMP_parallel, omp_get_thread_num and omp_get_num_threads, for a ``count`` of several threads.
    """
    names = ["ptr %segment", "ptr %x", "i64 %rows", "ptr %out", "i64 %stride", "i64 %accumulate", "ptr %scratch"]
    code = Function("multiply", [*names, "i64 %slot", "i64 %count", "ptr %calls"])
    code.do("call void @prepare_chain(ptr %segment, ptr %x, i64 %rows, ptr %scratch, i64 %slot)")
    job = code.variable("[8 x i64]")
    arguments = ["%segment", "%rows", "%out", "%stride", "%accumulate", "%scratch", "%slot", "%calls"]
    for index, value in enumerate(arguments):
        kind = "ptr" if value in ("%segment", "%out", "%scratch", "%calls") else "i64"
        code.store(kind, value, code.at("i64", job, str(index)))
    alone = code.value("icmp sle i64 %count, 1")
    threads = code.value("trunc i64 %count to i32")
    code.branch(
        alone,
        lambda: code.do(f"call void @share(ptr {job}, i64 0, i64 1)"),
        lambda: code.do(f"call void {code.load('ptr', '%calls')}(ptr @team, ptr {job}, i32 {threads}, i32 0)"),
    )
    return code.text()


def _team() -> str:
    """Write what every thread of a team runs."""
    code = Function("team", ["ptr %job"], internal=True)
    calls = code.load("ptr", code.at("i64", "%job", "7"))
    found = [code.value(f"call i32 {code.load('ptr', code.at('i64', calls, str(index)))}()") for index in (1, 2)]
    thread, count = (code.value(f"sext i32 {each} to i64") for each in found)
    code.do(f"call void @share(ptr %job, i64 {thread}, i64 {count})")
    return code.text()


def _share() -> str:
    """Write one thread's share: its range of tiles in every segment."""
    code = Function("share", ["ptr %job", "i64 %thread", "i64 %count"], internal=True)
    kinds = ["ptr", "i64", "ptr", "i64", "i64", "ptr", "i64"]
    first, rows, out, stride, accumulate, scratch, slot = (
        code.load(kind, code.at("i64", "%job", str(index))) for index, kind in enumerate(kinds)
    )
    adds = code.value(f"icmp ne i64 {accumulate}, 0")
    current = code.variable("ptr", first)
    code.do("br label %segment")
    code.label("segment")
    segment = code.load("ptr", current)
    field = read_fields(code, segment)
    tiles = code.value(f"sdiv i64 {code.add(field['outputs'], TILE - 1)}, {TILE}")
    start = code.value(f"sdiv i64 {code.mul(tiles, '%thread')}, %count")
    end = code.value(f"sdiv i64 {code.mul(tiles, code.add('%thread', 1))}, %count")
    xs, sums = _slot(code, field, scratch, rows, slot)
    code.do(
        f"call void {field['work']}(ptr {segment}, ptr {xs}, ptr {sums}, i64 {rows}, ptr {out}, i64 {stride}, "
        f"i1 {adds}, i64 {start}, i64 {end})"
    )
    code.store("ptr", field["next"], current)
    code.do(f"br i1 {code.is_null(field['next'])}, label %done, label %segment")
    code.label("done")
    return code.text()


def _prepare_chain() -> str:
    """Write ``prepare_chain``: the prepared inputs of all segments of a chain."""
    code = Function(
        "prepare_chain", ["ptr %segment", "ptr %x", "i64 %rows", "ptr %scratch", "i64 %slot"], internal=True
    )
    current = code.variable("ptr", "%segment")
    code.do("br label %prepare")
    code.label("prepare")
    segment = code.load("ptr", current)
    field = read_fields(code, segment)
    wanted = code.value(f"icmp ne ptr {field['prepare']}, null")
    xs, sums = _slot(code, field, "%scratch", "%rows", "%slot")
    arguments = f"ptr {segment}, ptr %x, i64 %rows, ptr {xs}, ptr {sums}"
    code.branch(wanted, lambda: code.do(f"call void {field['prepare']}({arguments})"))
    code.store("ptr", field["next"], current)
    code.do(f"br i1 {code.is_null(field['next'])}, label %done, label %prepare")
    code.label("done")
    return code.text()


def _prepare() -> str:
    """Write ``prepare``: inputs times their factors, and the sums of groups times theirs."""
    code = Function("prepare", ["ptr %segment", "ptr %x", "i64 %rows", "ptr noalias %xs", "ptr noalias %sums"])
    field = read_fields(code, "%segment")
    eight = "<8 x float>"
    sum_factor = code.load("float", code.at("float", field["factors"], str(SUM_FACTOR)))

    def row(index: str) -> None:
        source = code.at("float", "%x", code.mul(index, field["inputs"]))
        target = code.at("float", "%xs", code.mul(index, field["inputs"]))

        def group(number: str) -> None:
            total = code.variable(eight, "zeroinitializer")
            code.store(eight, "zeroinitializer", total)
            first = code.mul(number, field["blocks"])

            def block(at: str) -> None:
                start = code.mul(at, 8)
                half = code.value(f"and i64 {start}, 8")
                factors = code.load(eight, code.at("float", field["factors"], half))

                values = load_inputs(code, field, source, start)
                code.store(eight, code.value(f"fadd {eight} {code.load(eight, total)}, {values}"), total)
                code.store(eight, code.value(f"fmul {eight} {values}, {factors}"), code.at("float", target, start))

            code.loop(first, code.add(first, field["blocks"]), block)
            found = code.value(
                f"call reassoc float @llvm.vector.reduce.fadd.v8f32(float 0.0, {eight} {code.load(eight, total)})"
            )
            at = code.at("float", "%sums", code.add(code.mul(index, field["groups"]), number))
            code.store("float", code.value(f"fmul float {found}, {sum_factor}"), at)

        code.loop("0", field["groups"], group)

    code.loop("0", "%rows", row)
    return code.text() + "declare float @llvm.vector.reduce.fadd.v8f32(float, <8 x float>)\n"


def load_inputs(code: Function, field: dict[str, str], source: str, start: str) -> str:
    """Return 8 inputs of a row, from place ``start`` of the segment's order on."""
    eight, spare = "<8 x float>", code.variable("[8 x float]")

    def gather() -> None:
        for place in range(8):
            from_index = code.load("i32", code.at("i32", field["order"], code.add(start, place)))
            value = code.load("float", code.at("float", source, code.value(f"sext i32 {from_index} to i64")))
            code.store("float", value, code.at("float", spare, str(place)))

    def copy() -> None:
        code.store(eight, code.load(eight, code.at("float", source, start)), spare)

    code.branch(code.is_null(field["order"]), copy, gather)
    return code.load(eight, spare)


def _replay() -> str:
    """Write ``replay``: ``count`` recorded calls, each an address and ten 64-bit arguments.

    A function takes as many arguments as it has: in the calling conventions of x86-64 and arm64 the caller removes the
    others.
    """
    code = Function("replay", ["ptr %calls", "i64 %count"])

    def call(index: str) -> None:
        start = code.at("i64", "%calls", code.mul(index, CALL_FIELDS))
        function = code.load("ptr", start)
        arguments = [code.load("i64", code.at("i64", start, str(number))) for number in range(1, CALL_FIELDS)]
        code.do(f"call void {function}({', '.join(f'i64 {argument}' for argument in arguments)})")

    code.loop("0", "%count", call)
    return code.text()


def _slot(code: Function, field: dict[str, str], scratch: str, rows: str, slot: str) -> tuple[str, str]:
    """Return the addresses of a slot's inputs and sums."""
    start = code.mul(code.mul(field["slot"], rows), slot)
    xs = code.at("float", scratch, start)
    return xs, code.at("float", xs, code.mul(rows, field["inputs"]))


def read_fields(code: Function, segment: str) -> dict[str, str]:
    """Read a segment's fields; unused ones cost nothing after optimisation."""
    addresses = ("next", "work", "prepare", "order", "low", "high", "scale", "offset", "bias", "factors")
    return {
        name: code.load("ptr" if name in addresses else "i64", code.at("i64", segment, str(index)))
        for index, name in enumerate(SEGMENT)
    }
