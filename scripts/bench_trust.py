"""What trust costs and what it withstands: time to join, the pairing exchange, a flood of false names, parsers fed with
damaged bytes, and a member that has turned.

``scripts/bench trust [pairing joining flood fuzz rogue]``, all of them unless some are named. ``--inputs N`` per
parser (100,000 unless given), ``--sockets N`` through a real pairing port (500).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from figures import Row, below, print_rows
from google.protobuf.message import DecodeError
from trust_flood import flood_rows
from trust_rogue import rogue_rows

from edgepipe.cluster.discovery import read_texts
from edgepipe.cluster.pairing_exchange import Attempt, PairingWindow, join
from edgepipe.cluster.tries import FREE_FAILURES, Tries
from edgepipe.cluster.trust import merge
from edgepipe.errors import EdgepipeError
from edgepipe.ids import EngineId, Epoch, StepId
from edgepipe.link.receiver import RingReceiver
from edgepipe.system import SystemClock
from edgepipe.wire.codec import from_wire, to_wire
from edgepipe.wire.common import epoch_to_wire
from edgepipe.wire.trust import TrustStatement
from edgepipe.wire.v1 import stage_pb2
from edgepipe.wire.v1 import trust_pb2 as pb
from tests.support.cluster.pairing import PairingLab, damaged, fuzz_exchange

INPUTS = 100_000
SOCKETS = 500
JOIN_ROUNDS = 3
PAIR_ROUNDS = 20
WAIT_S = 60.0
GROWTH_BYTES = 8 << 20  # growth of a process that fuzzed for minutes: arenas of the allocator move by a few MB


def pairing_rows() -> list[Row]:
    """The exchange on loopback with the real SPAKE2, from the joiner's connect to its last word, without a question."""
    times = [asyncio.run(_pair()) for _ in range(PAIR_ROUNDS)]
    return [
        below(f"pairing exchange, median of {PAIR_ROUNDS}", statistics.median(times), "s", 1.0),
        below("  the slowest", max(times), "s", 1.0),
    ]


async def _pair() -> float:
    lab = PairingLab.make()
    window, port = await _window(lab)
    began = time.perf_counter()
    joiner = lab.joiner()
    await join(joiner, host="127.0.0.1", port=port, keep=lambda _: None, on_waiting=lambda: None)
    took = time.perf_counter() - began
    await window.close()
    return took


async def _window(lab: PairingLab) -> tuple[PairingWindow, int]:
    attempts: list[Attempt] = []

    async def ask(*_: object) -> bool:
        return True

    async def let_in(*_: object):
        return lab.with_joiner(), {}

    window = PairingWindow(
        make_pairing=lab.host, ask=ask, let_in=let_in, on_attempt=attempts.append, tries=Tries(guessable=False)
    )
    return window, await window.open(host="127.0.0.1", port=0)


def joining_rows() -> list[Row]:
    """Real commands: a machine without an identity joins a running node, starts, and is alive in the other's view."""
    times = [asyncio.run(_join_fresh()) for _ in range(JOIN_ROUNDS)]
    return [
        below(f"fresh identity to joined, median of {JOIN_ROUNDS}", statistics.median(t for t, _ in times), "s", 10.0),
        Row("  and its node started and seen by the host", statistics.median(t for _, t in times), "s"),
    ]


async def _join_fresh() -> tuple[float, float]:
    with tempfile.TemporaryDirectory(prefix="edgepipe-bench-") as folder:
        host, other = Path(folder) / "host", Path(folder) / "other"
        started: list[asyncio.subprocess.Process] = []
        try:
            started.append(await _node(host))
            inviting = await _edgepipe("node", "invite", "--yes", "--data-dir", str(host))
            started.append(inviting)
            code, where = await _code(inviting)
            began = time.perf_counter()
            arguments = ("node", "join", "--host", where, code, "--name", "other", "--data-dir", str(other))
            joining = await _edgepipe(*arguments)
            if await joining.wait():
                raise RuntimeError("joining failed")
            joined = time.perf_counter() - began
            started.append(await _node(other))
            await _until_seen(host)
            return joined, time.perf_counter() - began
        finally:
            for process in started:
                if process.returncode is None:
                    process.terminate()
                await process.wait()


async def _edgepipe(*arguments: str) -> asyncio.subprocess.Process:
    command = [sys.executable, "-P", "-m", "edgepipe.cli", *arguments]
    return await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)


async def _node(data_dir: Path) -> asyncio.subprocess.Process:
    options = ("--backend", "none", "--port", "0", "--http-port", "0", "--interface", "127.0.0.1", "--json")
    process = await _edgepipe("node", "start", *options, "--data-dir", str(data_dir), "--log-level", "error")
    await _line(process, lambda line: line == b"}\n")
    return process


async def _code(process: asyncio.subprocess.Process) -> tuple[str, str]:
    """The code and the address in what ``node invite`` prints: ``... node join --host HOST:PORT CODE``."""
    line = await _line(process, lambda line: b"--host" in line)
    where, code = line.decode().split("--host ")[1].split()
    return code, where


async def _line(process: asyncio.subprocess.Process, wanted: Callable[[bytes], bool]) -> bytes:
    assert process.stdout is not None
    async with asyncio.timeout(WAIT_S):
        while not wanted(line := await process.stdout.readline()):
            if not line:
                raise RuntimeError("the command ended early")
    return line


async def _until_seen(data_dir: Path) -> None:
    from edgepipe.cli.admin import connect

    async with connect(data_dir) as admin, asyncio.timeout(WAIT_S):
        while len((await admin.status()).members) < 2:  # noqa: ASYNC110 - looking often is the point
            await asyncio.sleep(0.02)


def fuzz_rows(*, inputs: int, sockets: int) -> list[Row]:
    """Each parser with so many damaged inputs: errors of ours only, and no growth after the first tenth."""
    quick = PairingLab.make(stubbed=True)
    rng = random.Random(5)
    rows: list[Row] = []
    for name, feed in (
        ("pairing exchanges (SPAKE2 stubbed)", lambda: fuzz_exchange(quick, rng)),
        ("trust statements", _statements(quick, rng)),
        ("TXT records", _texts(rng)),
        ("activation frames", _frames(rng)),
    ):
        rows += _fuzzed(name, feed, inputs)
    crashes, grown = asyncio.run(_through_sockets(sockets, rng))
    rows.append(below(f"{sockets} damaged exchanges through a socket: crashes", crashes, "", 0))
    rows.append(below("  memory grown", grown / 2**20, "MB", GROWTH_BYTES / 2**20))
    return rows


def _fuzzed(name: str, feed: Callable[[], object], count: int) -> list[Row]:
    crashes, began = 0, time.perf_counter()
    before = _memory()
    for index in range(count):
        if index == count // 10:
            before = _memory()
        try:
            feed()
        except EdgepipeError:
            pass
        except Exception as exc:
            crashes += 1
            print(f"{name}: {type(exc).__name__}: {exc}", file=sys.stderr)
    took = time.perf_counter() - began
    return [
        below(f"{count} damaged {name}: crashes", crashes, "", 0),
        below("  memory grown", max(0, _memory() - before) / 2**20, "MB", GROWTH_BYTES / 2**20),
        Row("  inputs per second", count / took, "/s"),
    ]


def _statements(lab: PairingLab, rng: random.Random) -> Callable[[], object]:
    whole = lab.with_joiner()
    known = [to_wire(one, pb.TrustStatement).SerializeToString() for one in whole.signed()]

    def feed() -> object:
        try:
            told = from_wire(pb.TrustStatement.FromString(damaged(rng.choice(known), rng)), TrustStatement)
        except DecodeError:
            return None
        if rng.random() < 0.5:
            told = replace(told, body=damaged(told.body, rng))
        merged = merge(lab.store, [told])
        foreign = set(merged.store.peers) - set(whole.peers)
        if foreign:
            raise AssertionError(f"let in: {foreign}")
        return merged

    return feed


def _texts(rng: random.Random) -> Callable[[], object]:
    record = {
        b"cluster_id": b"abc",
        b"cluster": b"home",
        b"node_id": b"x" * 52,
        b"name": "küche".encode(),
        b"protocol": b"1",
    }

    def feed() -> object:
        pairs = {damaged(key, rng): damaged(value, rng) for key, value in record.items()}
        texts = read_texts(pairs)
        if texts is not None and not all(text.isprintable() for pair in texts.items() for text in pair):
            raise AssertionError("a control character came through")
        return texts

    return feed


def _frames(rng: random.Random) -> Callable[[], object]:
    """Frames of a link that expects steps of 1 KB in chunks of 256 bytes; after an error the link begins anew."""
    epoch, seen = Epoch(3, EngineId("engine")), dict[str, Any](steps=0)

    def fresh() -> None:
        receiver = RingReceiver(
            epoch=epoch, window=4, clock=SystemClock(), on_step=lambda *_: None, on_held=lambda: None
        )
        receiver.expect(StepId(1), 1024, bulk=False)
        seen.update(receiver=receiver, step=1, chunk=0)

    def feed() -> object:
        if rng.random() < 0.02:
            fresh()
        frame = stage_pb2.Frame(step=seen["step"], chunk=seen["chunk"], data=bytes(256), epoch=epoch_to_wire(epoch))
        try:
            frame = stage_pb2.Frame.FromString(damaged(frame.SerializeToString(), rng))
        except DecodeError:
            return None  # gRPC ends the stream there
        seen["chunk"] += 1
        try:
            seen["receiver"].frame(StepId(frame.step), frame.chunk, frame.data, frame.sent_us, bulk=frame.bulk)
        except EdgepipeError:
            fresh()
        return None

    fresh()
    return feed


async def _through_sockets(count: int, rng: random.Random) -> tuple[int, int]:
    """Damaged exchanges with a host on a real port; a fresh window before this address has to wait."""
    lab = PairingLab.make(stubbed=True)
    failures: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(str(context)))
    window, port = await _window(lab)
    before = _memory()
    for index in range(count):
        if index % FREE_FAILURES == 0:
            await window.close()
            window, port = await _window(lab)
        if index == count // 10:
            before = _memory()
        await _bad_call(lab, port, rng)
    await window.close()
    gc.collect()
    for failure in failures:
        print(failure, file=sys.stderr)
    return len(failures), max(0, _memory() - before)


async def _bad_call(lab: PairingLab, port: int, rng: random.Random) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    joiner = lab.joiner()
    said: bytes | None = joiner.hello
    try:
        async with asyncio.timeout(5.0):
            while said is not None:
                data = damaged(said, rng)
                writer.write(damaged(struct.pack(">I", len(data)), rng)[:4] + data)
                if rng.random() < 0.5:
                    writer.write_eof()
                length = int.from_bytes(await reader.readexactly(4), "big")
                said = joiner.receive(await reader.readexactly(length))
    except (EdgepipeError, OSError, TimeoutError, asyncio.IncompleteReadError, RuntimeError):
        pass
    finally:
        writer.transport.abort()


def _memory() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=INPUTS)
    parser.add_argument("--sockets", type=int, default=SOCKETS)
    parser.add_argument("parts", nargs="*", metavar="PART")
    given = parser.parse_args(arguments)
    parts: dict[str, Callable[[], list[Row]]] = {
        "pairing": pairing_rows,
        "joining": joining_rows,
        "flood": flood_rows,
        "fuzz": lambda: fuzz_rows(inputs=given.inputs, sockets=given.sockets),
        "rogue": rogue_rows,
    }
    if unknown := set(given.parts) - set(parts):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    rows = [row for name, measure in parts.items() if name in (given.parts or parts) for row in measure()]
    print_rows("trust", rows)


if __name__ == "__main__":
    main()
