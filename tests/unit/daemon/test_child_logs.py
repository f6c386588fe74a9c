"""What libraries log in a child process, and what of it reaches the node's log."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from grpc._cython.cygrpc import ExecuteBatchError  # pyright: ignore[reportMissingTypeStubs, reportAttributeAccessIssue, reportUnknownVariableType]

from edgepipe.telemetry.log import not_of_a_hang_up


def test_only_grpc_s_reports_of_hang_ups_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.Logger("grpc")
    logger.addHandler(caplog.handler)
    logger.addFilter(not_of_a_hang_up)
    for failure in (ExecuteBatchError(), ValueError("a bug")):  # pyright: ignore[reportUnknownVariableType]
        try:
            raise failure
        except Exception:
            logger.exception("raised in core by servicer method")
    logger.error("without an exception")
    assert [record.exc_info[0] if record.exc_info else None for record in caplog.records] == [ValueError, None]


def test_a_log_is_not_doubled_into_a_file_that_nothing_shortens(tmp_path: Path) -> None:
    """launchd appends a service's stderr to a file for as long as the machine runs."""
    log, code = (
        tmp_path / "node.log",
        "import logging, sys; from pathlib import Path; "
        + (
            "from edgepipe.telemetry.log import set_up_logging; set_up_logging(level='info', file=Path(sys.argv[1])); "
            "logging.getLogger('x').error('hello'); raise SystemExit('broken')"
        ),
    )
    with (tmp_path / "service.err").open("w") as stderr:
        subprocess.run([sys.executable, "-c", code, str(log)], stderr=stderr, check=False)
    assert "hello" in log.read_text()
    assert (tmp_path / "service.err").read_text() == "broken\n", "what ends the process is still said there"
    piped = subprocess.run([sys.executable, "-c", code, str(log)], capture_output=True, text=True, check=False)
    assert "hello" in piped.stderr, "journald keeps its own limits"
