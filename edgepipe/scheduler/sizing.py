"""How many micro-batches: the throughput that measured stages and links allow, and the M that makes the most of it.

Stage i takes ``d_i(b)`` for a decode step of b rows, its outgoing link ``u_i(b)`` for that step's activations. Devices
and links are servers; latency L (all one-way delays, sampling, the token's return) is none, so it lengthens a token's
turn and never the cycle. With S sequences in M micro-batches, b = S / M::

    T(M) = max(d_i, u_i)    turn(M) = sum(d_i + u_i) + L    X(M) = min(b / T, S / turn)

No rule such as "one per stage" is used: each further micro-batch reads the weights again, each one too few leaves the
slowest server idle. Curves are measured while the ring runs, so M follows load and network.
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
_KEPT = 4096  # samples after which a size that was not seen again is forgotten: a minute or two of decoding
_HALF_LIFE = 256  # samples after which a size counts half where sizes contradict each other
_STEADY = 20  # samples beyond which a size's mean is no surer
_RARE = 0.25  # of the other's weight: too little to contradict it
_ENOUGH = 3  # steps until a curve is believed
_DEVICE_GROWING = 0.5  # weights are read whatever the rows; hopeful enough that another M is tried and measured
_SPREAD = 1.25  # sizes that differ less say nothing of the slope
_MIN_SIZE_DIFFERENCE = 128 << 10  # bytes; below it, what a busy host adds to a trip drowns what the wire does
_BULK_ROWS = 64  # of an upload that is long against what every message costs
_WINDOW = 128  # steps over a link: the fastest of this and of the last window count

EQUAL = 0.01  # what forecasts may differ by and still be called equal
GAIN = 0.03  # predicted, for M to move: less is noise
TURNS_BETWEEN = 2  # one that fills with the new M and one to measure
MOST_TURNS_BETWEEN = 8  # where looks change nothing: under a second in most rings
SLACK = 2.0  # standard deviations of a step's time, where b cannot grow


def most_micro_batches(num_stages: int) -> int:
    """The largest M that is ever tried: beyond it, latency is so long that fewer devices would do better."""
    return 4 * num_stages + 8


@dataclass(slots=True)
class _Point:
    size: float
    seconds: float
    count: int
    newest: int  # number of the curve's sample that it took last


class Curve:
    """Seconds against a size (rows, bytes), from live samples: a smoothed mean per bucket of sizes.

    More never takes less: where samples contradict that, newer ones win. Between measured sizes it is linear. Beyond
    them it goes on with the slope of the whole. A single size says nothing of the slope; then ``growing`` is the share
    of its time that is taken to grow with the size.
    """

    def __init__(self, *, growing: float) -> None:
        self._growing = growing
        self._points: dict[int, _Point] = {}
        self._samples = 0
        self._variance = 0.0

    @property
    def samples(self) -> int:
        """Taken so far."""
        return self._samples

    @property
    def known(self) -> bool:
        """Whether it has been measured often enough to be believed."""
        return self._samples >= _ENOUGH

    @property
    def jitter(self) -> float:
        """Coefficient of variation of samples of the same size."""
        return self._variance**0.5

    def note(self, size: float, seconds: float) -> None:
        """One measurement."""
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

    def at(self, sizes: Floats) -> Floats:
        """Seconds at each size; zeros while nothing has been measured."""
        xs, ys = self._fit()
        if not len(xs):
            return np.zeros_like(sizes)
        if len(xs) > 1 and xs[-1] >= _SPREAD * xs[0]:
            slope = (ys[-1] - ys[0]) / (xs[-1] - xs[0])
        else:
            slope = self._growing * ys[0] / xs[0]
        short = min(slope, ys[0] / xs[0]) * np.maximum(xs[0] - sizes, 0.0)
        beyond = min(slope, ys[-1] / xs[-1]) * np.maximum(sizes - xs[-1], 0.0)
        return np.interp(sizes, xs, ys) - short + beyond

    def _forget(self) -> None:
        """Drop sizes that have not been seen for long; there is a point for every size within a factor of 1.09."""
        oldest = self._samples - _KEPT
        for bucket in [bucket for bucket, point in self._points.items() if point.newest < oldest]:
            del self._points[bucket]

    def _fit(self) -> tuple[Floats, Floats]:
        """Sizes and seconds, both ascending: isotonic regression by pooling adjacent violators.

        What is rare or old and contradicts the rest is left out: a step that a busy host held up once says nothing.
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
    """One slice's time for a decode step, against rows. Steps that hold prompt tokens are kept apart: they count only
    until a step without any has been seen (under a steady stream of prompts there may be none for long)."""

    def __init__(self) -> None:
        self._decode = Curve(growing=_DEVICE_GROWING)
        self._mixed = Curve(growing=_DEVICE_GROWING)

    @property
    def known(self) -> bool:
        """Whether it can be believed."""
        return self._decode.known or self._mixed.known

    @property
    def jitter(self) -> float:
        """Coefficient of variation of a step's time."""
        return self._chosen.jitter

    def note(self, *, num_rows: int, num_tokens: int, seconds: float) -> None:
        """One step on the device."""
        (self._decode if num_tokens == num_rows else self._mixed).note(num_tokens, seconds)

    def at(self, rows: Floats) -> Floats:
        """Seconds of a decode step of so many rows."""
        return self._chosen.at(rows)

    @property
    def _chosen(self) -> Curve:
        return self._decode if self._decode.known else self._mixed


class LinkCurve:
    """One link's time for a step's bytes. Several witnesses, since none is right everywhere:

    * how long the sender's stream took them: exact where sending blocks, too short where a socket's buffer hides it;
    * how far apart the first and the last piece of a large step arrived: the wire's own rate, on the receiver's clock;
    * how much longer large steps are there and back than small ones, by the fastest of each;
    * no upload takes longer than there and back.
    """

    def __init__(self) -> None:
        self._uploads = Curve(growing=1.0)
        self._spread_s_per_byte = 0.0
        self._arrivals = 0
        self._now: _Fastest = {}
        self._before: _Fastest = {}  # the window before

    def note_upload(self, *, num_bytes: int, seconds: float) -> None:
        """The sender's stream took a step."""
        self._uploads.note(num_bytes, seconds)

    def note_arrival(self, *, num_bytes: int, round_trip_s: float, spread_bytes: int, spread_s: float) -> None:
        """The receiver got a step.

        round_trip_s  from its leaving to its credit's return, without the stay at the receiver
        spread_bytes  what came after its first piece, and ``spread_s`` how long that took
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
        """Seconds that the link is busy with so many bytes."""
        return np.maximum(self._uploads.at(num_bytes), num_bytes * self._s_per_byte())

    def seconds(self, num_bytes: int) -> float:
        """``at`` of one size."""
        return float(self.at(np.array([float(num_bytes)]))[0])

    def _s_per_byte(self) -> float:
        """What arrivals say; 0 while they say nothing."""
        slope = self._spread_s_per_byte or min(_slope(self._now), _slope(self._before))
        if slope == inf:
            return 0.0
        fastest = [*self._now.values(), *self._before.values()]
        return min(slope, min((round_trip_s / num_bytes for round_trip_s, num_bytes in fastest), default=inf))


_Fastest = dict[int, tuple[float, int]]  # by size class: the shortest round trip in a window, and its bytes


def _slope(fastest: _Fastest) -> float:
    """Seconds per byte between the fastest small and the fastest large step; infinite while sizes are too alike.

    Both are of one window: what the network was like minutes ago says nothing of now.
    """
    if not fastest:
        return inf
    low_s, low = fastest[min(fastest)]
    high_s, high = fastest[max(fastest)]
    return max(0.0, high_s - low_s) / (high - low) if high - low >= _MIN_SIZE_DIFFERENCE else inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """What has been measured of a pipeline."""

    stages: Sequence[Sequence[StageCurve]]  # of the slices of each stage, in the order of a token's way
    links: Sequence[LinkCurve]  # stage i to stage i + 1
    row_bytes: int  # of one row's activations on a link
    latency_s: float  # L: all one-way delays, sampling, the token's return to stage 0

    @property
    def known(self) -> bool:
        """Whether every slice has been measured."""
        return all(curve.known for curves in self.stages for curve in curves)

    @property
    def jitter(self) -> float:
        """Coefficient of variation of the least steady slice's step time."""
        return max(curve.jitter for curves in self.stages for curve in curves)


def link_cap_tokens(ring: Ring, *, rows: float) -> int | None:
    """Tokens that the slowest link uploads while the slowest device computes a decode step of so many rows; None while
    that is not known."""
    if not ring.known:
        return None
    decode, bulk = np.array([rows]), np.array([_BULK_ROWS * float(ring.row_bytes)])
    device_s = max(float(sum(curve.at(decode)[0] for curve in curves)) for curves in ring.stages)
    token_s = max((float(link.at(bulk)[0]) for link in ring.links), default=0.0) / _BULK_ROWS
    return int(device_s / token_s) if token_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What one M would give."""

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

    ``max_rows`` caps b. Where b cannot grow, micro-batches are added to ride out jitter instead; elsewhere that would
    cost more than it gains, because each reads the weights again.
    """

    def __init__(self, ring: Ring, *, sequences: int, max_rows: int = 0) -> None:
        if sequences < 1:
            raise ValueError("a ring without sequences makes no tokens")
        self._ring = ring
        self._limit = min(sequences, most_micro_batches(len(ring.stages)))
        counts = np.arange(1, self._limit + 1, dtype=np.float64)
        self._max_rows = max_rows or inf
        rows = np.minimum(sequences / counts, self._max_rows)
        devices = [np.sum([curve.at(rows) for curve in curves], axis=0) for curves in ring.stages]
        uploads = [link.at(rows * ring.row_bytes) for link in ring.links]
        self._servers: Floats = np.stack([*devices, *uploads])
        self._server_s: Floats = np.maximum(self._servers.max(axis=0), 1e-9)
        self._turn_s: Floats = np.maximum(self._servers.sum(axis=0) + ring.latency_s, 1e-9)
        self._rows = rows
        self._tokens_per_s: Floats = np.minimum(rows / self._server_s, counts * rows / self._turn_s)

    @property
    def limit(self) -> int:
        """The largest M that is considered."""
        return self._limit

    def of(self, micro_batches: int) -> Forecast:
        """What an M gives; more than there are sequences is as many as there are."""
        index = min(micro_batches, self._limit) - 1
        slowest = int(self._servers[:, index].argmax())
        num_stages = len(self._ring.stages)
        link = slowest - num_stages
        return Forecast(
            micro_batches=index + 1,
            tokens_per_s=float(self._tokens_per_s[index]),
            server_s=float(self._server_s[index]),
            turn_s=float(self._turn_s[index]),
            bottleneck=f"stage {slowest}" if link < 0 else f"link {link}-{link + 1}",
        )

    def best(self) -> Forecast:
        """The M with the most tokens per second; of equals the smallest, whose tokens come soonest and which jitter
        hurts least."""
        most = self._tokens_per_s.max()
        index = int(np.flatnonzero(self._tokens_per_s >= most * (1 - EQUAL))[0])
        if self._rows[index] >= self._max_rows:
            turns = self._turn_s[index] / self._server_s[index]
            index = max(index, min(ceil((1 + SLACK * self._ring.jitter) * turns), self._limit) - 1)
        return self.of(index + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """The M in use and the reason, for people."""

    micro_batches: int
    why: str
    bottleneck: str = ""  # "stage 1", "link 1-2"; empty while not known
    tokens_per_s: float = 0.0  # predicted at this M; 0 while not known


class Sizer:
    """Moves M towards the best one: by one at a time, at most once in ``TURNS_BETWEEN`` turns, and only for a
    predicted gain of ``GAIN``. Where sequences have left, it is as many as remain: there cannot be more. While neither
    M nor the number of sequences changes, it looks less often.

    Counts retired steps; knows no clock. An M that somebody asked for stays, told with what the ring makes of it.
    """

    def __init__(self, *, num_stages: int, fixed: int = 0, max_rows: int = 0) -> None:
        self._fixed = fixed
        self._max_rows = max_rows
        self._retired = 0  # steps since the last look
        self._sequences: int = 0  # at the last look
        self._turns_between: int = TURNS_BETWEEN
        why = f"{fixed}, as asked for" if fixed else "1 per stage (still measuring)"
        self.sizing = Sizing(micro_batches=fixed or num_stages, why=why)

    def due(self, *, sequences: int) -> bool:
        """Count a retired step, while so many sequences share the ring; True when it is time to ``decide``."""
        self._retired += 1
        turns = self._turns_between if sequences == self._sequences else TURNS_BETWEEN
        return self._retired >= turns * self.sizing.micro_batches

    def decide(self, ring: Ring, *, sequences: int) -> Sizing:
        """Look at the ring and at how many sequences share it."""
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

    def _towards(self, now: Forecast, best: Forecast) -> int:
        current = now.micro_batches  # at most as many as there are sequences
        capped = self._max_rows and best.micro_batches > current and best.tokens_per_s >= now.tokens_per_s
        if best.tokens_per_s > now.tokens_per_s * (1 + GAIN) or capped:
            return current + (1 if best.micro_batches > current else -1)
        return current


def _reason(forecast: Forecast, latency_s: float, sequences: int) -> str:
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
