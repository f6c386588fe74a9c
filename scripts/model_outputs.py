"""Reads outputs of models of a folder of chat templates: ``scripts/outputs FOLDER [--random N] [--seed N] [--each]``.

For each ``*.jinja``: what the template writes of standard turns, and N random outputs of the grammar that binds calls,
spread over the templates. Each is read whole, by characters and by threes, and its turn is rendered back: equal text
has equal tokens. Run only templates that you trust: no limits. ``--each`` prints what was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path

from tests.support.gateways.grammar_walks import byte_vocabulary
from tests.support.gateways.model_outputs import FAILURES, TURNS, Family, Tally, tally

NO_FAMILY = (
    *("Apertus", "Apriel", "unsloth-Apriel", "CohereForAI-c4ai-command-r-plus", "GigaChat", "Kimi-K3", "MiniMax-M1"),
    *("MiniMax-M3", "Reka", "Spark", "inclusionai-ling", "poolside", "muse", "openbmb", "tencent", "upstage", "MiMo"),
    *("StepFun", "fireworks", "meetkai", "llama-cpp-", "Bielik"),
)
"""Beginnings of names of templates whose model families edgepipe does not serve, or that no model brings."""


async def main() -> None:
    """Print the table."""
    arguments = _arguments()
    paths = [path for path in sorted(arguments.folder.glob("*.jinja")) if not path.stem.startswith(NO_FAMILY)]
    families: dict[str, Family] = {}
    for path in paths:
        families[path.stem] = Family(path.read_text(encoding="utf-8").removeprefix("\ufeff"))
    callers = [name for name, family in families.items() if _writes_calls(family)]
    vocabulary = byte_vocabulary()
    tallies: dict[str, Tally] = {}
    for name, family in families.items():
        share = _share(arguments.random, callers, name)
        tallies[name] = await tally(family, vocabulary, num_random=share, seed=f"{arguments.seed}/{name}")
    print("\n".join(table({name: family.chat.name for name, family in families.items()}, tallies)))
    for name, counts in tallies.items() if arguments.each else ():
        for fault in counts.faults:
            print(f"{name}: {fault}")


def table(formats: Mapping[str, str], tallies: Mapping[str, Tally]) -> Iterator[str]:
    """Yield the lines of the table: one row a format."""
    by_format: dict[str, list[Tally]] = defaultdict(list)
    for name, counts in tallies.items():
        by_format[formats[name]].append(counts)
    yield f"{date.today():%Y-%m-%d}, {len(tallies)} templates. Printed by `scripts/outputs FOLDER`."
    yield ""
    yield "| format | templates | their outputs | random | read the same however cut | read as meant | same text back |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for name, rows in sorted(by_format.items()):
        yield _row(name, rows)
    yield _row("all", list(tallies.values()))


def _row(name: str, rows: Sequence[Tally]) -> str:
    outputs, written = sum(row.outputs for row in rows), sum(row.written for row in rows)
    same = sum(row.same for row in rows)
    cells = [
        name,
        len(rows),
        written,
        outputs - written,
        f"{sum(row.cut_alike for row in rows)} of {outputs}",
        f"{sum(row.meant for row in rows)} of {written}",
        f"{same} of {outputs} ({same / max(1, outputs):.1%})",
    ]
    return f"| {' | '.join(map(str, cells))} |"


def _writes_calls(family: Family) -> bool:
    """Return whether a template writes a call that can be read."""
    try:
        return family.read(family.written(TURNS["call"]), 3).calls == TURNS["call"].calls
    except FAILURES:
        return False


def _share(total: int, names: Sequence[str], name: str) -> int:
    """Return a template's part of the random outputs."""
    if name not in names:
        return 0
    return total // len(names) + (names.index(name) < total % len(names))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--random", type=int, default=300)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--each", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main())
