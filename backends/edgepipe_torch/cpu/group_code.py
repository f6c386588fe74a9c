"""LLVM code that multiplies groups of rows, each group with a weight of its own.

A step's rows are sorted by expert. One call multiplies all groups: threads first share the groups to prepare inputs,
then the tiles of every group.

P sorted rows, T rows, K experts that each row uses.
"""

from __future__ import annotations

from edgepipe_torch.cpu.frame import read_fields
from edgepipe_torch.cpu.ir_text import Function
from edgepipe_torch.cpu.ir_vectors import EIGHT, fma

GROUP = ("segment", "first", "rows")  # 64-bit fields of a group: address of the first segment, first sorted row, rows
_JOB = ("groups", "num_groups", "x", "out", "stride", "scratch", "pitch", "slot", "calls")
_ADDRESSES = ("groups", "x", "out", "scratch", "calls")


def group_functions() -> list[str]:
    """Return ``multiply_groups`` and what it calls, for the module of ``multiply``."""
    return [_multiply_groups(), _team("prepare"), _team("multiply"), _prepare_groups(), _share_groups()]


def _multiply_groups() -> str:
    """Write ``multiply_groups``: x [P, I], each group times its chain of segments, into out [P, stride].

    ``scratch``: P * pitch floats, pitch = slots of a chain * slot. ``count`` and ``calls`` as in ``multiply``.
    """
    code = Function(
        "multiply_groups",
        [
            *("ptr %groups", "i64 %num_groups", "ptr %x", "ptr %out", "i64 %stride", "ptr %scratch", "i64 %pitch"),
            *("i64 %slot", "i64 %count", "ptr %calls"),
        ],
    )
    job = code.variable(f"[{len(_JOB)} x i64]")
    for index, name in enumerate(_JOB):
        code.store("ptr" if name in _ADDRESSES else "i64", f"%{name}", code.at("i64", job, str(index)))
    threads = code.value("trunc i64 %count to i32")

    def alone() -> None:
        code.do(f"call void @prepare_groups(ptr {job}, i64 0, i64 1)")
        code.do(f"call void @multiply_share(ptr {job}, i64 0, i64 1)")

    def team() -> None:
        parallel = code.load("ptr", "%calls")
        for name in ("prepare", "multiply"):
            code.do(f"call void {parallel}(ptr @{name}_team, ptr {job}, i32 {threads}, i32 0)")

    code.branch(code.value("icmp sle i64 %count, 1"), alone, team)
    return code.text()


def _team(name: str) -> str:
    """Write what every thread of a team runs: its share of preparing or of multiplying."""
    code = Function(f"{name}_team", ["ptr %job"], internal=True)
    calls = _fields(code)["calls"]
    found = [code.value(f"call i32 {code.load('ptr', code.at('i64', calls, str(index)))}()") for index in (1, 2)]
    thread, count = (code.value(f"sext i32 {each} to i64") for each in found)
    work = {"prepare": "prepare_groups", "multiply": "multiply_share"}[name]
    code.do(f"call void @{work}(ptr %job, i64 {thread}, i64 {count})")
    return code.text()


def _prepare_groups() -> str:
    """Write one thread's share of preparing: its range of groups."""
    code = Function("prepare_groups", ["ptr %job", "i64 %thread", "i64 %count"], internal=True)
    field = _fields(code)
    start = code.value(f"sdiv i64 {code.mul(field['num_groups'], '%thread')}, %count")
    end = code.value(f"sdiv i64 {code.mul(field['num_groups'], code.add('%thread', 1))}, %count")

    def group(index: str) -> None:
        own = _group(code, field, index)
        inputs = read_fields(code, own["segment"])["inputs"]
        x = code.at("float", field["x"], code.mul(own["first"], inputs))
        scratch = code.at("float", field["scratch"], code.mul(own["first"], field["pitch"]))
        code.do(
            f"call void @prepare_chain(ptr {own['segment']}, ptr {x}, i64 {own['rows']}, ptr {scratch}, "
            f"i64 {field['slot']})"
        )

    code.loop(start, end, group)
    return code.text()


def _share_groups() -> str:
    """Write one thread's share of multiplying: its range of tiles in every segment of every group."""
    code = Function("multiply_share", ["ptr %job", "i64 %thread", "i64 %count"], internal=True)
    field = _fields(code)
    inner = code.variable("[8 x i64]")  # the arguments of ``share``

    def group(index: str) -> None:
        own = _group(code, field, index)
        out = code.at("float", field["out"], code.mul(own["first"], field["stride"]))
        scratch = code.at("float", field["scratch"], code.mul(own["first"], field["pitch"]))
        values = (own["segment"], own["rows"], out, field["stride"], "0", scratch, field["slot"])
        kinds = ("ptr", "i64", "ptr", "i64", "i64", "ptr", "i64")
        for place, (kind, value) in enumerate(zip(kinds, values, strict=True)):
            code.store(kind, value, code.at("i64", inner, str(place)))
        code.do(f"call void @share(ptr {inner}, i64 %thread, i64 %count)")

    code.loop("0", field["num_groups"], group)
    return code.text()


def join_function() -> str:
    """Write ``join``: add to each row of total [T, H] the rows ``places`` [T, K] of out [P, H] times weights [T, K]."""
    code = Function(
        "join",
        [
            *("ptr noalias %out", "ptr noalias %places", "ptr noalias %weights", "ptr noalias %total"),
            *("i64 %rows", "i64 %used", "i64 %size"),
        ],
    )

    def row(index: str) -> None:
        first = code.mul(index, "%used")
        target = code.at("float", "%total", code.mul(index, "%size"))

        def expert(number: str) -> None:
            at = code.add(first, number)
            place = code.load("i64", code.at("i64", "%places", at), align=8)
            source = code.at("float", "%out", code.mul(place, "%size"))
            weight = code.splat("float", code.load("float", code.at("float", "%weights", at)), 8)

            def eight(start: str) -> None:
                value = code.load(EIGHT, code.at("float", source, start))
                to = code.at("float", target, start)
                code.store(EIGHT, fma(code, weight, value, code.load(EIGHT, to)), to)

            code.loop("0", "%size", eight, step=8)

        code.loop("0", "%used", expert)

    code.loop("0", "%rows", row)
    return code.text()


def _group(code: Function, field: dict[str, str], index: str) -> dict[str, str]:
    """Read the fields of a group."""
    start = code.at("i64", field["groups"], code.mul(index, len(GROUP)))
    return {
        name: code.load("ptr" if name == "segment" else "i64", code.at("i64", start, str(place)), align=8)
        for place, name in enumerate(GROUP)
    }


def _fields(code: Function) -> dict[str, str]:
    """Read the fields of ``%job``."""
    return {
        name: code.load("ptr" if name in _ADDRESSES else "i64", code.at("i64", "%job", str(index)), align=8)
        for index, name in enumerate(_JOB)
    }
