"""Run llama.cpp's own converter on several folders in one process.

    python scripts/referee_converter.py CONVERTER.py JOBS.json

JOBS.json: a list of {"folder", "file", "type", "pre"}. The converter knows tokenizers by a hash; ``pre`` is the name
that it would find for the family's real one. All else is the converter's. Prints one JSON line for each job.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Convert all folders."""
    converter, jobs = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    sys.path.insert(0, str(converter.parent))
    spec = importlib.util.spec_from_file_location("converter", converter)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for job in jobs:
        print(json.dumps({"file": job["file"], "error": _convert(module, job)}), flush=True)


def _convert(module: Any, job: dict[str, str]) -> str:
    """Convert one folder. Return the error's text; empty if it went well."""

    def known(_self: object, _tokenizer: object) -> str:
        return job["pre"]

    from conversion.base import TextModel  # type: ignore[import-not-found] - of llama.cpp

    TextModel.get_vocab_base_pre = known
    sys.argv = ["convert", job["folder"], "--outfile", job["file"], "--outtype", job["type"]]
    try:
        module.main()
    except (Exception, SystemExit) as failed:
        logging.getLogger("converter").debug("failed", exc_info=True)
        return f"{type(failed).__name__}: {failed}"
    return ""


if __name__ == "__main__":
    main()
