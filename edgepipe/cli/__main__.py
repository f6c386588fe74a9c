"""``python -m edgepipe.cli``: the same as ``edgepipe``."""

from edgepipe.cli.main import main

main()
