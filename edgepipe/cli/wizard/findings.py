"""Findings of the doctor, as the wizard shows them."""

from __future__ import annotations

from edgepipe.cli.doctor.findings import Finding, Level, Ports
from edgepipe.cli.wizard.asking import done, note, warn
from edgepipe.cli.wizard.state import Setup
from edgepipe.config import HTTP_PORT, NODE_PORT


def ports_of(setup: Setup) -> Ports:
    """Return the ports of this machine's node."""
    return Ports(node=setup.config.port or NODE_PORT, http=setup.config.http_port or HTTP_PORT)


def show_finding(finding: Finding) -> None:
    """Print a finding with its level and its remedy."""
    text = finding.what + (f" ({finding.fact})" if finding.fact else "")
    if finding.level is Level.OK:
        done(text)
    elif finding.level is Level.NOTE:
        note(text)
    else:
        warn(text, remedy=finding.remedy)
