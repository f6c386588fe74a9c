"""Choose the number of micro-batches M that maximises throughput over the measured stages and links.

Stage i takes ``d_i(b)`` for a decode step of b rows, its outgoing link ``u_i(b)`` for that step's activations. Devices
and links are servers. Latency L (all one-way delays, sampling, the token's return) is not a server, so it lengthens a
token's turn and never the cycle. With S sequences in M micro-batches, b = S / M::

    T(M) = max(d_i, u_i)    turn(M) = sum(d_i + u_i) + L    X(M) = min(b / T, S / turn)

Where M does not divide S, some micro-batches have a row more. They never overtake each other, so all wait for the turn
of the largest one: ``turn`` is that of ``ceil(b)`` rows, T that of the mean.

A rule such as "one per stage" does not hold: each further micro-batch reads the weights again, and each missing one
leaves the slowest server idle. Experts are read as far as the rows use them, so a further micro-batch costs less than
with dense layers and a row more. The curves are measured while the ring runs, so M follows load and network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, log2

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_BUCKETS_PER_OCTAVE = 8  # 9 % wide: tile edges of kernels stay visible
_SMOOTHING = 0.1  # weight of the newest value: about the last twenty count
_KEPT = 4096  # a size without a sample among so many is forgotten: a minute or two of decoding
_HALF_LIFE = 256  # where sizes contradict each other, a size's weight halves after so many samples
_STEADY = 20  # more samples than this do not raise a size's weight
_RARE = 0.25  # share of another size's weight that is too small to contradict it
_ENOUGH = 3  # steps until a curve counts as known
_DEVICE_GROWING = 0.5  # weights are read whatever the rows; optimistic, so that another M is tried and measured
_SPREAD = 1.25  # sizes that differ by a smaller factor give no slope
_MIN_SIZE_DIFFERENCE = 128 << 10  # bytes; below it, a busy host's delay hides the wire's
_WINDOW = 128  # steps over a link; the fastest of this window and of the one before count

EQUAL = 0.01  # forecasts within this share are equal
GAIN = 0.03  # predicted gain needed to change M; less is noise
TURNS_BETWEEN = 2  # one turn fills with the new M, one measures it
MOST_TURNS_BETWEEN = 32  # most turns between decisions while they change nothing: some seconds in most rings
SLACK = 2.0  # standard deviations of a step's time to cover where b cannot grow


def most_micro_batches(num_stages: int) -> int:
    """Return the largest M to try. A ring that needs more has so much latency that fewer devices would be faster."""
    return 4 * num_stages + 8


@dataclass(slots=True)
class _Point:
    size: float
    seconds: float
    count: int
    newest: int  # index of its latest sample in the curve's count


class Curve:
    """Seconds as a function of size (rows, bytes), from live samples: a smoothed mean per bucket of sizes.

    The curve never falls: where samples contradict that, newer ones win. It is linear between measured sizes and
    continues beyond them with the overall slope. With a single size, ``growing`` is the share of its time assumed to
    grow with the size.
    """

    def __init__(self, *, growing: float) -> None:
        self._growing = growing
        self._points: dict[int, _Point] = {}
        self._samples = 0
        self._variance = 0.0

    @property
    def samples(self) -> int:
        """Number of samples so far."""
        return self._samples

    @property
    def known(self) -> bool:
        """Whether the curve has enough samples."""
        return self._samples >= _ENOUGH

    @property
    def reach(self) -> float:
        """Largest measured size; 0 before the first sample."""
        return max([point.size for point in self._points.values()], default=0.0)

    @property
    def jitter(self) -> float:
        """Coefficient of variation among samples of the same size."""
        return self._variance**0.5

    def note(self, size: float, seconds: float) -> None:
        """Record one measurement."""
        if size <= 0 or seconds < 0:
            return
        self._samples += 1
        bucket = round(_BUCKETS_PER_OCTAVE * log2(size))
        point = self._points.get(bucket)
        if point is None:
            self._points[bucket] = _Point(size, seconds, 1, self._samples)
            self._forget()
            return
        point.count += 1
        point.newest = self._samples
        weight = max(_SMOOTHING, 1 / point.count)
        if point.seconds:
            deviation = (seconds - point.seconds) / point.seconds
            self._variance += _SMOOTHING * (deviation * deviation - self._variance)
        point.size += weight * (size - point.size)
        point.seconds += weight * (seconds - point.seconds)

    def at(self, sizes: Floats, *, beyond_s: float = 0.0) -> Floats:
        """Return the seconds at each size; zeros before the first sample.

        ``beyond_s``: seconds for each unit beyond the measured sizes, if that is known; 0: as these let expect.
        """
        xs, ys = self._fit()
        if not len(xs):
            return np.zeros_like(sizes)
        if len(xs) > 1 and xs[-1] >= _SPREAD * xs[0]:
            slope = (ys[-1] - ys[0]) / (xs[-1] - xs[0])
        else:
            slope = self._growing * ys[0] / xs[0]
        short = min(slope, ys[0] / xs[0]) * np.maximum(xs[0] - sizes, 0.0)
        beyond = (beyond_s or min(slope, ys[-1] / xs[-1])) * np.maximum(sizes - xs[-1], 0.0)
        return np.interp(sizes, xs, ys) - short + beyond

    def _forget(self) -> None:
        """Drop sizes without recent samples. Points are a factor of 1.09 apart."""
        oldest = self._samples - _KEPT
        for bucket in [bucket for bucket, point in self._points.items() if point.newest < oldest]:
            del self._points[bucket]

    def _fit(self) -> tuple[Floats, Floats]:
        """Return sizes and seconds, both ascending: isotonic regression by pooling adjacent violators.

        A rare or old point that contradicts the others is left out, such as one step that a busy host delayed.
        """
        self._forget()
        pooled: list[tuple[float, float, list[float]]] = []  # seconds, weight, sizes
        for point in sorted(self._points.values(), key=lambda point: point.size):
            seconds, sizes = point.seconds, [point.size]
            weight = min(point.count, _STEADY) * 0.5 ** ((self._samples - point.newest) / _HALF_LIFE)
            while pooled and pooled[-1][0] > seconds and weight >= _RARE * pooled[-1][1]:
                before, before_weight, before_sizes = pooled.pop()
                if before_weight >= _RARE * weight:
                    seconds = (before * before_weight + seconds * weight) / (before_weight + weight)
                    weight, sizes = before_weight + weight, before_sizes + sizes
            if not pooled or pooled[-1][0] <= seconds:
                pooled.append((seconds, weight, sizes))
        xs = [size for _, _, sizes in pooled for size in sizes]
        return np.array(xs), np.array([seconds for seconds, _, sizes in pooled for _ in sizes])


class StageCurve:
    """One slice's time for a decode step as a function of rows.

    Steps with prompt tokens have a curve of their own. It counts until enough pure decode steps were measured, which
    can take long under a steady stream of prompts.
    """

    def __init__(self) -> None:
        self._decode = Curve(growing=_DEVICE_GROWING)
        self._mixed = Curve(growing=_DEVICE_GROWING)

    @property
    def known(self) -> bool:
        """Whether one of the two curves has enough samples."""
        return self._decode.known or self._mixed.known

    @property
    def jitter(self) -> float:
        """Coefficient of variation of a step's time."""
        return self._chosen.jitter

    def note(self, *, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Record one step on the device."""
        (self._decode if num_tokens == num_rows else self._mixed).note(num_tokens, seconds)

    def at(self, rows: Floats) -> Floats:
        """Return the seconds of a decode step for each number of rows."""
        return self._chosen.at(rows)

    def with_sheet(self, rows: Floats, sheet_s: Floats) -> Floats:
        """Return the same, but beyond the measured sizes grow as the device's data sheet says.

        rows     [N] ascending, from 1 on
        sheet_s  [N] seconds by the data sheet
        """
        measured, reach = self.at(rows), self._chosen.reach
        beyond, known = rows > _SPREAD * reach, float(np.interp(reach, rows, sheet_s))
        if not reach or not known or not beyond.any():
            return measured
        return np.where(beyond, self.at(np.array([reach]))[0] * np.maximum(1.0, sheet_s / known), measured)

    @property
    def _chosen(self) -> Curve:
        return self._decode if self._decode.known else self._mixed


class LinkCurve:
    """One link's time as a function of a step's bytes, from several measurements, since none is right everywhere:

    * time until the sender's stream took the bytes: exact where sending blocks, too short where a socket buffers them;
    * time between the first and last piece of a large step at the receiver: the wire's own rate, on one clock;
    * round trips of the fastest large steps compared to the fastest small ones;
    * upper bound: no upload takes longer than its round trip.
    """

    def __init__(self) -> None:
        self._uploads = Curve(growing=1.0)
        self._spread_s_per_byte = 0.0
        self._arrivals = 0
        self._now: _Fastest = {}
        self._before: _Fastest = {}  # the previous window

    def note_upload(self, *, num_bytes: int, seconds: float) -> None:
        """Record the time until the sender's stream took a step."""
        self._uploads.note(num_bytes, seconds)

    def note_arrival(self, *, num_bytes: int, round_trip_s: float, spread_bytes: int, spread_s: float) -> None:
        """Record a step's arrival at the receiver.

        round_trip_s  from sending to the credit's return, without the time at the receiver
        spread_bytes  bytes after the first piece; ``spread_s``: seconds between the first piece and the last
        """
        if spread_bytes > 0 and spread_s > 0:
            slope = spread_s / spread_bytes
            weight = _SMOOTHING if self._spread_s_per_byte else 1.0
            self._spread_s_per_byte += weight * (slope - self._spread_s_per_byte)
        if num_bytes <= 0 or round_trip_s <= 0:
            return
        if self._arrivals % _WINDOW == 0:
            self._now, self._before = {}, self._now
        self._arrivals += 1
        size = num_bytes.bit_length()
        self._now[size] = min(self._now.get(size, (inf, 0)), (round_trip_s, num_bytes))

    def at(self, num_bytes: Floats) -> Floats:
        """Return the seconds that the link is busy with each number of bytes.

        What is larger than all measured steps takes the wire's own rate in addition: small steps cost the hosts more
        than the wire.
        """
        uploads_s = self._uploads.at(num_bytes, beyond_s=self._spread_s_per_byte)
        return np.maximum(uploads_s, num_bytes * self._s_per_byte())

    def seconds(self, num_bytes: int) -> float:
        """Return ``at`` for one size."""
        return float(self.at(np.array([float(num_bytes)]))[0])

    def _s_per_byte(self) -> float:
        """Return the rate that the arrivals show; 0 while unknown."""
        slope = self._spread_s_per_byte or min(_slope(self._now), _slope(self._before))
        if slope == inf:
            return 0.0
        fastest = [*self._now.values(), *self._before.values()]
        return min(slope, min((round_trip_s / num_bytes for round_trip_s, num_bytes in fastest), default=inf))


_Fastest = dict[int, tuple[float, int]]  # the shortest round trip of each size class in a window, and its bytes


def _slope(fastest: _Fastest) -> float:
    """Return seconds per byte between the fastest small and fastest large step; infinite if sizes are too similar.

    Both come from one window, because the network changes within minutes.
    """
    if not fastest:
        return inf
    low_s, low = fastest[min(fastest)]
    high_s, high = fastest[max(fastest)]
    return max(0.0, high_s - low_s) / (high - low) if high - low >= _MIN_SIZE_DIFFERENCE else inf


@dataclass(frozen=True, slots=True, kw_only=True)
class RingMeasurements:
    """Measurements of a pipeline."""

    stages: Sequence[Sequence[StageCurve]]  # the slices of each stage, in the order that a token passes them
    links: Sequence[LinkCurve]  # stage i to stage i + 1
    row_bytes: int  # size of one row's activations on a link
    latency_s: float  # L: all one-way delays, sampling, the token's return to stage 0

    @property
    def known(self) -> bool:
        """Whether every slice has been measured."""
        return all(curve.known for curves in self.stages for curve in curves)

    @property
    def jitter(self) -> float:
        """Coefficient of variation of the least steady slice's step time."""
        return max(curve.jitter for curves in self.stages for curve in curves)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeForecast:
    """Predicted performance at one M."""

    micro_batches: int
    tokens_per_s: float  # X
    server_s: float  # T
    turn_s: float
    bottleneck: str  # the slowest server: "stage 1" or "link 1-2", counted from 0 at the embedding

    @property
    def filled(self) -> bool:
        """Whether the slowest server never waits."""
        return self.micro_batches * self.server_s >= self.turn_s


class Forecasts:
    """``X(M)`` of a ring for 1 to ``limit`` micro-batches of S sequences.

    ``max_rows`` caps b. Where b cannot grow, more micro-batches absorb jitter. Elsewhere that would cost more than it
    gains, because each reads the weights again.
    """

    def __init__(self, ring: RingMeasurements, *, sequences: int, max_rows: int = 0) -> None:
        if sequences < 1:
            raise ValueError("a ring without sequences makes no tokens")
        self._ring = ring
        self._limit = min(sequences, most_micro_batches(len(ring.stages)))
        counts = np.arange(1, self._limit + 1, dtype=np.float64)
        self._max_rows = max_rows or inf
        rows = np.minimum(sequences / counts, self._max_rows)
        self._servers: Floats = _servers(ring, rows)
        largest = _servers(ring, np.minimum(np.ceil(sequences / counts), self._max_rows))
        self._server_s: Floats = np.maximum(self._servers.max(axis=0), 1e-9)
        self._turn_s: Floats = np.maximum(largest.sum(axis=0) + ring.latency_s, 1e-9)
        self._rows = rows
        self._tokens_per_s: Floats = np.minimum(rows / self._server_s, counts * rows / self._turn_s)

    @property
    def limit(self) -> int:
        """Largest M considered."""
        return self._limit

    def of(self, micro_batches: int) -> SizeForecast:
        """Return the forecast for an M, capped at ``limit``."""
        index = min(micro_batches, self._limit) - 1
        slowest = int(self._servers[:, index].argmax())
        num_stages = len(self._ring.stages)
        link = slowest - num_stages
        return SizeForecast(
            micro_batches=index + 1,
            tokens_per_s=float(self._tokens_per_s[index]),
            server_s=float(self._server_s[index]),
            turn_s=float(self._turn_s[index]),
            bottleneck=f"stage {slowest}" if link < 0 else f"link {link}-{link + 1}",
        )

    def best(self) -> SizeForecast:
        """Return the forecast with the most tokens per second.

        Among equals it is the smallest M, which has the shortest turn and suffers least from jitter.
        """
        most = self._tokens_per_s.max()
        index = int(np.flatnonzero(self._tokens_per_s >= most * (1 - EQUAL))[0])
        if self._rows[index] >= self._max_rows:
            turns = self._turn_s[index] / self._server_s[index]
            index = max(index, min(ceil((1 + SLACK * self._ring.jitter) * turns), self._limit) - 1)
        return self.of(index + 1)


def _servers(ring: RingMeasurements, rows: Floats) -> Floats:
    """Return the time [devices and links, sizes] of a decode step for each number of rows."""
    devices = [np.sum([curve.at(rows) for curve in curves], axis=0) for curves in ring.stages]
    return np.stack([*devices, *(link.at(rows * ring.row_bytes) for link in ring.links)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """The M in use, and the reason in words."""

    micro_batches: int
    why: str
    bottleneck: str = ""  # "stage 1", "link 1-2"; empty while not known
    tokens_per_s: float = 0.0  # predicted at this M; 0 while not known


class Sizer:
    """Moves M towards the best one: by one, at most once in ``TURNS_BETWEEN`` turns, for a predicted gain of ``GAIN``.

    M never exceeds the number of sequences, so it falls at once when sequences leave. While neither changes, decisions
    become rarer. The sizer counts retired steps and reads no clock. An M that the user fixed stays; its forecast is
    reported.
    """

    def __init__(self, *, num_stages: int, fixed: int = 0, max_rows: int = 0) -> None:
        self._fixed = fixed
        self._max_rows = max_rows
        self._retired = 0  # steps since the last decision
        self._sequences: int = 0  # number of sequences at the last decision
        self._turns_between: int = TURNS_BETWEEN
        why = f"{fixed}, as asked for" if fixed else "1 per stage (still measuring)"
        self.sizing = Sizing(micro_batches=fixed or num_stages, why=why)

    def due(self, *, sequences: int) -> bool:
        """Count a retired step. Return whether it is time to ``decide``. ``sequences``: number in the ring now."""
        self._retired += 1
        turns = self._turns_between if sequences == self._sequences else TURNS_BETWEEN
        return self._retired >= turns * self.sizing.micro_batches

    def decide(self, ring: RingMeasurements, *, sequences: int) -> Sizing:
        """Choose M for the measured ring and the number of sequences that share it."""
        self._retired = 0
        if sequences < 1 or not ring.known:
            return self.sizing
        forecasts = Forecasts(ring, sequences=sequences, max_rows=self._max_rows)
        now, best = forecasts.of(self.sizing.micro_batches), forecasts.best()
        wanted = self._fixed or self._towards(now, best)
        settled = wanted == self.sizing.micro_batches and sequences == self._sequences
        self._turns_between = min(2 * self._turns_between, MOST_TURNS_BETWEEN) if settled else TURNS_BETWEEN
        self._sequences = sequences
        forecast = forecasts.of(wanted)
        self.sizing = Sizing(
            micro_batches=wanted,
            why=self.sizing.why if self._fixed else _reason(forecast, ring.latency_s, sequences),
            bottleneck=forecast.bottleneck,
            tokens_per_s=forecast.tokens_per_s,
        )
        return self.sizing

    def _towards(self, now: SizeForecast, best: SizeForecast) -> int:
        current = now.micro_batches  # M is at most the number of sequences
        capped = self._max_rows and best.micro_batches > current and best.tokens_per_s >= now.tokens_per_s
        if best.tokens_per_s > now.tokens_per_s * (1 + GAIN) or capped:
            return current + (1 if best.micro_batches > current else -1)
        return current


def _reason(forecast: SizeForecast, latency_s: float, sequences: int) -> str:
    turn = f"each token takes {_ms(forecast.turn_s)}, {_ms(latency_s)} of it on the network"
    slowest = f"{forecast.micro_batches}, since {forecast.bottleneck} takes {_ms(forecast.server_s)} a step"
    if forecast.filled:
        return f"{slowest} and never waits; {turn}"
    if forecast.micro_batches >= sequences:
        alone = f"{sequences}, since each of {sequences} sequences goes alone"
        return f"{alone}; {turn}" if sequences > 1 else f"1, for one sequence; {turn}"
    return f"{slowest}, and one more would cost what it gains; {turn}"


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:.1f} ms" if milliseconds < 100 else f"{milliseconds:.0f} ms"
