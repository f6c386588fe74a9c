"""Four RTX 4090s on a laptop: how fast they would serve a 32B model, over which network.

The simulator runs edgepipe's own planner and scheduler on models of devices and links::

    python examples/emulated_cluster.py                  # bars on the terminal
    python examples/emulated_cluster.py --plot out.png   # and a picture; needs pip install 'edgepipe[plot]'
"""

from __future__ import annotations

import argparse
from pathlib import Path

from edgepipe.cli.views.report_plot import plot_reports
from edgepipe.scheduler import make_policy
from edgepipe.shapes.loader import named_shape
from edgepipe.simulation.imagined import ImaginedCluster, imagine
from edgepipe.simulation.report import RunReport
from edgepipe.simulation.simulator import Run, simulate
from edgepipe.simulation.workload import Arrivals, WorkloadSpec, make_workload
from edgepipe.units import parse_link

DEVICES = ("rtx4090",) * 4
MODEL = "qwen2.5-32b"
LINKS = ("ideal", "10gbit,0.1ms", "1gbit,0.3ms", "300mbit,3ms")
USERS, REQUESTS = 32, 96
BAR_COLUMNS = 40
WITH_PROCESSES = f'edgepipe bench --emulate "4x rtx4090" --as-model {MODEL} --link 1gbit,0.3ms --concurrency {USERS}'


def simulate_link(link: str) -> RunReport:
    """Serve all requests over one kind of link."""
    cluster = ImaginedCluster(devices=DEVICES, config=named_shape(MODEL), link=parse_link(link))
    workload = WorkloadSpec(arrivals=Arrivals.CLOSED, num_requests=REQUESTS, concurrency=USERS)
    return simulate(
        Run(
            cluster=imagine(cluster),
            workload=make_workload(workload),
            policy=make_policy("throttled"),
            label=f"link={link}",
        )
    )


def main() -> None:
    """Simulate every link and draw the results."""
    parser = argparse.ArgumentParser(description="What four RTX 4090s would do with a 32B model.")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture, such as out.png")
    arguments = parser.parse_args()
    reports = {link: simulate_link(link) for link in LINKS}
    fastest = max(report.output_tokens_per_s for report in reports.values())
    print(f"{MODEL} on {len(DEVICES)} x {DEVICES[0]}, {USERS} users: output tokens/s, and how busy the GPUs are\n")
    for link, report in reports.items():
        bar = "█" * round(BAR_COLUMNS * report.output_tokens_per_s / fastest)
        print(f"{link:>14} {bar:<{BAR_COLUMNS}} {report.output_tokens_per_s:6.0f} {1 - report.bubble:5.0%}")
    print(f"\nThe same cluster with real processes and an emulated network:\n  {WITH_PROCESSES}")
    if arguments.plot is not None:
        plot_reports(list(reports.values()), arguments.plot)
        print(f"\nWho computes when: {arguments.plot}")


if __name__ == "__main__":
    main()
