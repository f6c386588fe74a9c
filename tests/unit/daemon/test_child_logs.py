"""What libraries log in a child process, and what of it reaches the node's log."""

from __future__ import annotations

import logging

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
