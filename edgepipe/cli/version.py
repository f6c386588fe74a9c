"""``edgepipe version``"""

from __future__ import annotations

import platform
import sys

from edgepipe import PROTOCOL_VERSION, __version__
from edgepipe.cli.options import Json
from edgepipe.cli.output import print_json


def version(as_json: Json = False) -> None:
    """Show versions and the installed backends."""
    from edgepipe.daemon.machine.backends import installed_backends

    backends = list(installed_backends())
    if as_json:
        print_json(
            {
                "version": __version__,
                "protocol": PROTOCOL_VERSION,
                "python": platform.python_version(),
                "platform": f"{platform.system()} {platform.machine()}",
                "backends": backends,
            }
        )
        return
    print(f"edgepipe {__version__} · protocol {PROTOCOL_VERSION} · Python {sys.version.split()[0]}")
    print(f"{platform.system()} {platform.machine()} · backends: {', '.join(backends) or 'none'}")
