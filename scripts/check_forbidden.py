"""Fails on calls that turn data into code, and on reading the environment outside ``edgepipe/config.py``."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UNSAFE = re.compile(
    r"\b(?:import|from)\s+(?:pickle|cPickle|dill|cloudpickle|marshal|shelve)\b"
    r"|\btorch\.(?:load|save)\(|allow_pickle\s*=\s*True|(?<![\w.])(?:eval|exec)\(|\byaml\.(?:unsafe_)?load\("
    r"|\btrust_remote_code\s*=\s*True"
)
ENVIRONMENT = re.compile(r"\bos\.(?:environ(?!\.setdefault)|getenv)\b")


def findings() -> list[str]:
    """``path:line: what`` of everything that is forbidden."""
    found: list[str] = []
    for path in [*ROOT.glob("edgepipe/**/*.py"), *ROOT.glob("backends/**/*.py")]:
        relative = path.relative_to(ROOT).as_posix()
        if relative.startswith("edgepipe/wire/v1/"):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if UNSAFE.search(line):
                found.append(f"{relative}:{number}: turns data into code: {line.strip()}")
            if not relative.startswith("edgepipe/config.py") and ENVIRONMENT.search(line):
                found.append(f"{relative}:{number}: only edgepipe/config.py reads the environment: {line.strip()}")
    return found


if __name__ == "__main__":
    problems = findings()
    print("\n".join(problems) or "none")
    sys.exit(bool(problems))
