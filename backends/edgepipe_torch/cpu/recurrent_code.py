"""LLVM code of one token of recurrent layers: gated delta rule, Mamba-2, short convolution. All are float32.

A state is read from memory once: torch's operations go over it four times, and copy it where a row reads and writes
different slots. A row's results depend on that row alone.

N rows with one token, C channels of the convolution, H heads, G groups of them. A head's state: DeltaNet [K, V],
Mamba-2 [D, M]. All these sizes but H and G are multiples of 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgepipe.spec.layer_spec import DeltaNet, Mamba2, Recurrent, ShortConv
from edgepipe_torch.cpu.ir_text import Function
from edgepipe_torch.cpu.ir_vectors import (
    EIGHT,
    fma,
    larger,
    smaller,
    sum_of,
)
from edgepipe_torch.cpu.recurrent_phase import Phase, read_job
from edgepipe_torch.cpu.step_code import float_field, step_declarations

_BLOCK = 128  # channels that a thread convolves at once
_TOGETHER = 4  # rows of a state that are read side by side


@dataclass(frozen=True, slots=True)
class StepForm:
    """What the code of a mixer's step depends on."""

    kind: str  # delta | mamba | short
    taps: int
    inner: int = 0  # rows of a head's state: K or D
    outer: int = 0  # V or M

    @property
    def name(self) -> str:
        """The layer's name in logs."""
        names = {"delta": "gated DeltaNet", "mamba": "Mamba-2", "short": "short convolutions"}
        return f"{names[self.kind]} of {self.inner} x {self.outer}" if self.inner else names[self.kind]


def step_form(spec: Recurrent) -> StepForm | None:
    """Return the form of a mixer's step; None if the code lacks it."""
    match spec:
        case DeltaNet():
            found = StepForm("delta", spec.taps, spec.key_dim, spec.value_dim)
        case Mamba2():
            found = StepForm("mamba", spec.taps, spec.head_dim, spec.state_dim)
        case ShortConv():
            found = StepForm("short", spec.taps)
    sizes = (spec.channels, found.inner, found.outer)
    return None if any(size % 8 for size in sizes) else found


def recurrent_module(form: StepForm) -> str:
    """Return a module with ``step(job)``: the convolution of N rows, then their heads, shared out among threads."""
    phases = {"convolve": _convolve(form.taps, gated=form.kind == "short")}
    if form.kind == "delta":
        phases["heads"] = _delta_heads(form)
    elif form.kind == "mamba":
        phases |= {"heads": _mamba_heads(form), "normalise": _normalise_groups(form)}
    teams = [_team(name) for name in phases]
    more = ["declare float @llvm.sqrt.f32(float)"]
    return "\n".join([*phases.values(), *teams, _step(list(phases)), *more, *step_declarations()])


def _step(phases: Sequence[str]) -> str:
    """Write ``step``: the phases one after the other, each on all threads."""
    code = Function("step", ["ptr %job"])
    field = read_job(code)

    def alone() -> None:
        for name in phases:
            code.do(f"call void @{name}(ptr %job, i64 0, i64 1)")

    def team() -> None:
        parallel = code.load("ptr", field["calls"], align=8)
        count = code.value(f"trunc i64 {field['threads']} to i32")
        for name in phases:
            code.do(f"call void {parallel}(ptr @{name}_team, ptr %job, i32 {count}, i32 0)")

    code.branch(code.value(f"icmp sle i64 {field['threads']}, 1"), alone, team)
    return code.text()


def _team(name: str) -> str:
    """Write what every thread of a team runs: its share of a phase."""
    code = Function(f"{name}_team", ["ptr %job"], internal=True)
    calls = read_job(code)["calls"]
    found = [
        code.value(f"call i32 {code.load('ptr', code.at('i64', calls, str(index)), align=8)}()") for index in (1, 2)
    ]
    thread, count = (code.value(f"sext i32 {each} to i64") for each in found)
    code.do(f"call void @{name}(ptr %job, i64 {thread}, i64 {count})")
    return code.text()


def _convolve(taps: int, *, gated: bool) -> str:
    """Write ``convolve``: the new token of a causal convolution per channel, and the inputs that it leaves behind.

    gated  between the products with ``into`` and ``out_of``; else SiLU follows
    """
    phase = Phase("convolve")
    code, field = phase.code, phase.field
    channels = field["channels"]
    blocks = code.value(f"sdiv i64 {code.add(channels, _BLOCK - 1)}, {_BLOCK}")

    def block(row: str, number: str) -> None:
        x = phase.made("x", row)
        read, write = phase.slots("last", row, code.mul(channels, taps - 1))
        out = code.at("float", field["mixed"], code.mul(row, channels))
        start = code.mul(number, _BLOCK)
        stop = code.add(start, _BLOCK)
        end = code.value(f"select i1 {code.value(f'icmp slt i64 {stop}, {channels}')}, i64 {stop}, i64 {channels}")

        def eight(place: str) -> None:
            seen = [phase.eight(read, code.add(code.mul(channels, tap), place)) for tap in range(taps - 1)]
            new = phase.eight(x, place)
            if gated:
                new = phase.do("fmul", new, phase.eight(phase.made("into", row), place))
            seen.append(new)
            sums = code.variable(EIGHT, "zeroinitializer")
            biased = code.is_null(field["bias"])
            code.branch(biased, lambda: None, lambda: code.store(EIGHT, phase.eight(field["bias"], place), sums))
            found = code.load(EIGHT, sums)
            for tap, value in enumerate(seen):
                weight = phase.eight(field["weight"], code.add(code.mul(channels, tap), place))
                found = fma(code, value, weight, found)
            for tap, value in enumerate(seen[1:]):
                phase.keep(value, write, code.add(code.mul(channels, tap), place))
            if gated:
                found = phase.do("fmul", found, phase.eight(phase.made("out_of", row), place))
            else:
                found = phase.silu(found)
            phase.keep(found, out, place)

        code.loop(start, end, eight, step=8)

    return phase.each(blocks, block)


def _delta_heads(form: StepForm) -> str:
    """Write ``heads``: the gated delta rule of a row's head, in one pass from memory (Yang, Kautz, Hatamizadeh 2024).

    With p = S^T k and r = S^T q of the state S: what is written is e = beta (v - decay p), the state becomes
    decay S + k e^T, and its answer to q is decay r + (k q) e. The pass that writes reads S from the cache.
    """
    phase = Phase("heads")
    code, field = phase.code, phase.field
    key_dim, value_dim = form.inner, form.outer
    keys, queries = (code.variable(f"[{key_dim} x float]") for _ in range(2))
    known, answer = (code.variable(f"[{value_dim} x float]") for _ in range(2))  # p, then e; r, then the answer
    plain = code.value(f"icmp eq i64 {field['tiled']}, 0")
    shared = code.value(f"sdiv i64 {field['heads']}, {field['groups']}")

    def head(row: str, index: str) -> None:
        by_turns = code.value(f"srem i64 {index}, {field['groups']}")
        side_by_side = code.value(f"sdiv i64 {index}, {shared}")
        key_head = code.value(f"select i1 {plain}, i64 {side_by_side}, i64 {by_turns}")
        all_keys = code.mul(field["groups"], key_dim)
        mixed = code.at("float", field["mixed"], code.mul(row, field["channels"]))
        query = code.at("float", mixed, code.mul(key_head, key_dim))
        value = code.at("float", mixed, code.add(code.mul(all_keys, 2), code.mul(index, value_dim)))
        phase.unit(code.at("float", query, all_keys), keys, key_dim)
        phase.unit(query, queries, key_dim, factor=key_dim**-0.5)
        alpha = phase.do("fadd", phase.number(phase.made("first", row), index), phase.number(field["steps"], index))
        decay = phase.decay(phase.softplus(alpha), index)
        beta = phase.sigmoid(phase.number(phase.made("second", row), index))
        read, write = phase.head_states(row, index, key_dim * value_dim)
        _read_state(phase, form, read, ((keys, known), (queries, answer)))
        both = code.splat("float", phase.dot(keys, queries, str(key_dim)), 8)

        def finish(place: str) -> None:
            held = phase.do("fmul", decay, phase.eight(known, place))
            error = phase.do("fmul", beta, phase.do("fsub", phase.eight(value, place), held))
            phase.keep(error, known, place)
            phase.keep(fma(code, both, error, phase.do("fmul", decay, phase.eight(answer, place))), answer, place)

        code.loop("0", str(value_dim), finish, step=8)
        _write_state(phase, form, read, write, decay, keys, known)
        factor = phase.mean_root(answer, str(value_dim))
        z = code.at("float", phase.made("z", row), code.mul(index, value_dim))
        out = code.at("float", field["out"], code.mul(code.add(code.mul(row, field["heads"]), index), value_dim))

        def gate(place: str) -> None:
            weight = phase.do("fmul", factor, phase.eight(field["norm"], place))
            normed = phase.do("fmul", phase.eight(answer, place), weight)
            phase.keep(phase.do("fmul", normed, phase.silu(phase.eight(z, place))), out, place)

        code.loop("0", str(value_dim), gate, step=8)

    return phase.each(field["heads"], head)


def _read_state(phase: Phase, form: StepForm, state: str, sums: Sequence[tuple[str, str]]) -> None:
    """Write what multiplies a state's transpose [V, K] with vectors [K]; ``sums``: pairs of a vector and its result."""
    code = phase.code

    def clear(place: str) -> None:
        for _, result in sums:
            phase.keep("zeroinitializer", result, place)

    def some(first: str) -> None:
        numbers = [code.add(first, index) for index in range(_TOGETHER)]
        rows = [code.at("float", state, code.mul(number, form.outer)) for number in numbers]
        factors = [[phase.number(vector, number) for number in numbers] for vector, _ in sums]

        def eight(place: str) -> None:
            values = [phase.eight(row, place) for row in rows]
            for own, (_, result) in zip(factors, sums, strict=True):
                found = phase.eight(result, place)
                for value, factor in zip(values, own, strict=True):
                    found = fma(code, value, factor, found)
                phase.keep(found, result, place)

        code.loop("0", str(form.outer), eight, step=8)

    code.loop("0", str(form.outer), clear, step=8)
    code.loop("0", str(form.inner), some, step=_TOGETHER)


def _write_state(phase: Phase, form: StepForm, read: str, write: str, decay: str, keys: str, error: str) -> None:
    """Write ``decay S + k e^T`` of the state at ``read`` to ``write``, which may be the same."""
    code = phase.code

    def row(number: str) -> None:
        key, start = phase.number(keys, number), code.mul(number, form.outer)
        for place in range(0, form.outer, 8):
            at = code.add(start, place)
            kept = phase.do("fmul", decay, phase.eight(read, at))
            phase.keep(fma(code, key, phase.eight(error, str(place)), kept), write, at)

    code.loop("0", str(form.inner), row)


def _mamba_heads(form: StepForm) -> str:
    """Write ``heads``: a row's head of Mamba-2 (Dao, Gu 2024, section 7), multiplied with SiLU(z), before the norm."""
    phase = Phase("heads")
    code, field = phase.code, phase.field
    head_dim, state_dim = form.inner, form.outer
    into, answer = code.variable(f"[{head_dim} x float]"), code.variable(f"[{head_dim} x float]")
    of_group = code.value(f"sdiv i64 {field['heads']}, {field['groups']}")
    low, high = (code.splat("float", float_field(code, field[name]), 8) for name in ("low", "high"))

    def head(row: str, index: str) -> None:
        mixed = code.at("float", field["mixed"], code.mul(row, field["channels"]))
        x = code.at("float", mixed, code.mul(index, head_dim))
        group = code.mul(code.value(f"sdiv i64 {index}, {of_group}"), state_dim)
        keys = code.at("float", mixed, code.add(code.mul(field["heads"], head_dim), group))  # B, and then C
        queries = code.at("float", keys, code.mul(field["groups"], state_dim))
        step = phase.do("fadd", phase.number(phase.made("first", row), index), phase.number(field["steps"], index))
        step = smaller(code, larger(code, phase.softplus(step), low), high)
        decay = phase.decay(step, index)
        code.loop(
            "0",
            str(head_dim),
            lambda place: phase.keep(phase.do("fmul", phase.eight(x, place), step), into, place),
            step=8,
        )
        read, write = phase.head_states(row, index, head_dim * state_dim)

        def some(first: str) -> None:
            numbers = [code.add(first, number) for number in range(_TOGETHER)]
            starts = [code.mul(number, state_dim) for number in numbers]
            factors = [phase.number(into, number) for number in numbers]
            sums = [code.variable(EIGHT, "zeroinitializer") for _ in numbers]

            def eight(place: str) -> None:
                key, query = phase.eight(keys, place), phase.eight(queries, place)
                for start, factor, total in zip(starts, factors, sums, strict=True):
                    at = code.add(start, place)
                    state = fma(code, factor, key, phase.do("fmul", decay, phase.eight(read, at)))
                    phase.keep(state, write, at)
                    code.store(EIGHT, fma(code, state, query, code.load(EIGHT, total)), total)

            code.loop("0", str(state_dim), eight, step=8)
            for number, total in zip(numbers, sums, strict=True):
                code.store("float", sum_of(code, code.load(EIGHT, total)), code.at("float", answer, number))

        code.loop("0", str(head_dim), some, step=_TOGETHER)
        skip, at = phase.number(field["skips"], index), code.mul(index, head_dim)
        z, out = code.at("float", phase.made("z", row), at), code.at("float", _output(phase, form, row), at)

        def gate(place: str) -> None:
            found = fma(code, phase.eight(x, place), skip, phase.eight(answer, place))
            phase.keep(phase.do("fmul", found, phase.silu(phase.eight(z, place))), out, place)

        code.loop("0", str(head_dim), gate, step=8)

    return phase.each(field["heads"], head)


def _normalise_groups(form: StepForm) -> str:
    """Write ``normalise``: the RMSNorm of a row's group of heads, in place."""
    phase = Phase("normalise")
    code, field = phase.code, phase.field
    size = code.mul(code.value(f"sdiv i64 {field['heads']}, {field['groups']}"), form.inner)

    def group(row: str, index: str) -> None:
        at = code.mul(index, size)
        out, norm = code.at("float", _output(phase, form, row), at), code.at("float", field["norm"], at)
        factor = phase.mean_root(out, size)

        def eight(place: str) -> None:
            weight = phase.do("fmul", factor, phase.eight(norm, place))
            phase.keep(phase.do("fmul", phase.eight(out, place), weight), out, place)

        code.loop("0", size, eight, step=8)

    return phase.each(field["groups"], group)


def _output(phase: Phase, form: StepForm, row: str) -> str:
    """Return the address of a row's heads [H, D] of Mamba-2."""
    width = phase.code.mul(phase.field["heads"], form.inner)
    return phase.code.at("float", phase.field["out"], phase.code.mul(row, width))
