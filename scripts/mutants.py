"""Measures how strong the unit tests of pure modules are: changes one place at a time and runs the tests of its line.

scripts/mutants                       200 mutants of all pure modules, at most 30 minutes on two cores
scripts/mutants --count 60 --seed 2   another sample
scripts/mutants planner/ membership   only modules whose path has one of these words, and tests of their packages
scripts/mutants --contexts FILE       keeps or takes what coverage found, for several samples of one state of the tests

The steps: copy the tracked files, run the unit tests once under coverage, choose lines by a seed and a change of each
(mutant_operators.py), then run for each mutant the tests that run its line, the quickest files first. A test
that fails, or tests that take far longer than before, kill the mutant. Pure modules are those that say PURE, the
packages scheduler, planner and simulation, and ``ALSO``. Prints a table and the changes that no test noticed.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import coverage  # pyright: ignore[reportMissingImports]
from mutant_operators import Mutant, mutants, num_lines

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("scheduler", "planner", "simulation")
ALSO = (
    "sampling/edits",
    "sampling/draws",
    "/memory_classes",
    "/packed",
    "gateway/conversation",
    "engine/micro_batches",
)
NO_TESTS = ("cli", "mlx", "torch")  # folders of tests/unit that take minutes and run few pure lines
QUICK_FILES = 3  # files of tests that run first; most mutants die there
LAST_S = 60.0  # bound on a line's tests in measured time: more of them are left out, the slowest first
START_S = 120.0  # for a run of pytest besides its tests
SLOWER = 8.0  # than measured: a run that takes longer hangs


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the tests said of a mutant."""

    mutant: Mutant
    verdict: str  # killed, timed out, survived or untested


@dataclass(frozen=True, slots=True, kw_only=True)
class Contexts:
    """The tests that run each line, and how long each test takes."""

    by_line: dict[str, dict[int, list[str]]]  # node ids by path and line
    seconds: dict[str, float]

    def tests(self, path: str, line: int) -> list[str]:
        """Return the tests that run a line; for a line that runs at import, those that run any line of its module."""
        lines = self.by_line.get(path, {})
        found = set(lines.get(line, ())) or {test for tests in lines.values() for test in tests}
        return sorted(test for test in found if test in self.seconds)


def pure_modules(tree: Path, words: Iterable[str]) -> dict[str, str]:
    """Return the code of the pure modules by path; only of those that have one of the words, if there are any."""
    found: dict[str, str] = {}
    for path in sorted(tree.glob("edgepipe/**/*.py")):
        name, code = path.relative_to(tree).as_posix(), path.read_text(encoding="utf-8")
        pure = package_of(name) in PACKAGES or name.removesuffix(".py").endswith(ALSO) or "PURE" in code
        if pure and num_lines(code) and (not words or any(word in name for word in words)):
            found[name] = code
    return found


def package_of(path: str) -> str:
    """Return the name of a module's package, which is that of its folder of unit tests."""
    return path.split("/")[1]


def test_folders(tree: Path, paths: Iterable[str], *, all_of_them: bool) -> list[str]:
    """Return the folders of unit tests to run; the tests of a simulation are among those of the planner."""
    packages = {package_of(path) for path in paths} | {"planner"}
    folders = [path for path in sorted((tree / "tests/unit").iterdir()) if path.name not in NO_TESTS]
    chosen = [path for path in folders if all_of_them or path.name in packages]
    return [path.relative_to(tree).as_posix() for path in chosen if path.is_dir() or path.name.startswith("test_")]


def copy_tree(folder: Path) -> Path:
    """Copy the tracked files, so that no mutant is ever in the working tree."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def run_pytest(tree: Path, arguments: Iterable[str], *, limit_s: float, coverage_of: Iterable[str] = ()) -> int | None:
    """Run tests within a copy. Returns pytest's exit code; None: it was ended after ``limit_s``."""
    pytest = ["-m", "pytest", "-q", "-m", "not long", "--timeout=0", f"--rootdir={tree}", *arguments]
    measure = ["-m", "coverage", "run", f"--include={','.join(coverage_of)}"] if coverage_of else []
    backends, plugins = tree / "backends", ROOT / "scripts"
    environment = os.environ | {
        "PYTHONPATH": f"{tree}{os.pathsep}{backends}{os.pathsep}{plugins}",
        "MUTANTS_SECONDS": str(tree / "seconds.json"),
    }
    process = subprocess.Popen(
        [sys.executable, *measure, *pytest],
        cwd=tree,
        env=environment,
        stdout=subprocess.DEVNULL if not coverage_of else None,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()


def measure_contexts(tree: Path, paths: list[str], folders: Iterable[str]) -> Contexts:
    """Run the unit tests of these folders once under coverage."""
    run_pytest(tree, ["-p", "mutant_contexts", *folders], limit_s=3600.0, coverage_of=paths)
    data = coverage.CoverageData(str(tree / ".coverage"))
    data.read()
    by_line: dict[str, dict[int, list[str]]] = {}
    for path in paths:
        contexts = data.contexts_by_lineno(str(tree / path))
        by_line[path] = {line: sorted(filter(None, tests)) for line, tests in contexts.items() if any(tests)}
    return Contexts(by_line=by_line, seconds=json.loads((tree / "seconds.json").read_text(encoding="utf-8")))


def rounds(tests: list[str], seconds: dict[str, float]) -> list[list[str]]:
    """Return the tests in two rounds: those of the files with the quickest ones, and the others within ``LAST_S``."""
    files: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        files[test.partition("::")[0]].append(test)
    quickest = sorted(files, key=lambda name: sum(seconds[test] for test in files[name]) / len(files[name]))
    first = [test for name in quickest[:QUICK_FILES] for test in files[name]]
    left_s, last = LAST_S, list[str]()
    for test in sorted(set(tests) - set(first), key=lambda test: (seconds[test], test)):
        left_s -= seconds[test]
        if left_s > 0:
            last.append(test)
    return [each for each in (first, sorted(last)) if each]


def judge(mutant: Mutant, tree: Path, contexts: Contexts, *, number: int, seed: int) -> Outcome:
    """Run the tests of a mutant's line within a copy, which is as before afterwards."""
    tests = contexts.tests(mutant.path, mutant.place[0])
    if not tests:
        return Outcome(mutant=mutant, verdict="untested")
    path = tree / mutant.path
    before = path.stat()
    path.write_text(mutant.code, encoding="utf-8")
    os.utime(path, (number, number))  # bytecode is of a time and a size: each mutant has a time of its own
    try:
        for each in rounds(tests, contexts.seconds):
            listed = tree / "tests.txt"
            listed.write_text("\n".join([*each, ""]), encoding="utf-8")
            limit_s = START_S + SLOWER * sum(contexts.seconds[test] for test in each)
            code = run_pytest(tree, ["-x", f"--hypothesis-seed={seed}", f"@{listed}"], limit_s=limit_s)
            if code != 0:
                return Outcome(mutant=mutant, verdict="timed out" if code is None else "killed")
        return Outcome(mutant=mutant, verdict="survived")
    finally:
        path.write_text(mutant.before, encoding="utf-8")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def change(mutant: Mutant) -> str:
    """Return a mutant's change as the lines that differ."""
    lines = difflib.unified_diff(mutant.before.splitlines(), mutant.code.splitlines(), n=0, lineterm="")
    changed = [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    return "\n".join([f"{mutant.path}:{mutant.place[0]} {mutant.operator}", *changed])


def report(outcomes: list[Outcome], *, chosen: int) -> None:
    """Print survivors, then a table by module and the sum."""
    for outcome in outcomes:
        if outcome.verdict in ("survived", "untested"):
            print(f"\n{outcome.verdict}: {change(outcome.mutant)}")
    verdicts = ("killed", "timed out", "survived", "untested")
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in outcomes:
        counts[outcome.mutant.path][outcome.verdict] += 1
        counts["all"][outcome.verdict] += 1
    print(f"\n{'':58}" + "".join(f"{verdict:>11}" for verdict in verdicts))
    for name in sorted(counts, key=lambda name: (name == "all", name)):
        print(f"{name:58}" + "".join(f"{counts[name][verdict]:11}" for verdict in verdicts))
    noticed = counts["all"]["killed"] + counts["all"]["timed out"]
    summary = {"chosen": chosen, "judged": len(outcomes), **counts["all"]}
    print(f"\n{noticed / max(1, len(outcomes)):.0%} killed")
    print(json.dumps(summary))


def choose(codes: dict[str, str], *, count: int, seed: int) -> list[Mutant]:
    """Choose mutants of all modules; a module with twice the lines has twice as many."""
    rng = random.Random(seed)
    of_module = Counter(rng.choices(list(codes), [num_lines(code) for code in codes.values()], k=count))
    chosen = [mutant for path in of_module for mutant in mutants(path, codes[path], count=of_module[path], rng=rng)]
    rng.shuffle(chosen)
    return chosen


def main() -> None:
    """Run all steps."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=30.0, help="no mutant begins later")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--contexts", type=Path)
    chosen = parser.parse_args()
    until_s = time.monotonic() + 60 * chosen.minutes
    with tempfile.TemporaryDirectory(prefix="edgepipe-mutants-") as folder:
        first = copy_tree(Path(folder, "tree-0"))
        codes = pure_modules(first, chosen.words)
        contexts = kept_contexts(chosen.contexts, first, list(codes), everything=not chosen.words)
        trees: SimpleQueue[Path] = SimpleQueue()
        for index in range(chosen.jobs):
            if index:
                shutil.copytree(first, Path(folder, f"tree-{index}"))
            trees.put(Path(folder, f"tree-{index}"))
        all_mutants = choose(codes, count=chosen.count, seed=chosen.seed)

        def judge_one(number: int, mutant: Mutant) -> Outcome | None:
            if time.monotonic() > until_s:
                return None
            tree = trees.get()
            outcome = judge(mutant, tree, contexts, number=number, seed=chosen.seed)
            trees.put(tree)
            print(f"{outcome.verdict:10} {mutant.path}:{mutant.place[0]} {mutant.operator}", flush=True)
            return outcome

        with ThreadPoolExecutor(chosen.jobs) as pool:
            outcomes = list(pool.map(judge_one, range(1, len(all_mutants) + 1), all_mutants))
    report([outcome for outcome in outcomes if outcome is not None], chosen=len(all_mutants))


def kept_contexts(kept: Path | None, tree: Path, paths: list[str], *, everything: bool) -> Contexts:
    """Take the contexts of an earlier run from a file, or measure them and keep them there."""
    if kept is not None and kept.exists():
        content = json.loads(kept.read_text(encoding="utf-8"))
        lines = {path: {int(line): tests for line, tests in of.items()} for path, of in content["by_line"].items()}
        return Contexts(by_line=lines, seconds=content["seconds"])
    contexts = measure_contexts(tree, paths, test_folders(tree, paths, all_of_them=everything))
    if kept is not None:
        kept.write_text(json.dumps({"by_line": contexts.by_line, "seconds": contexts.seconds}), encoding="utf-8")
    return contexts


if __name__ == "__main__":
    main()
