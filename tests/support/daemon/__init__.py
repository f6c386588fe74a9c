"""Parts of a node's daemon with the rest made up: hosts of engines and keepers of gateways whose processes are
objects, serve books of several nodes, a node as commands see it (``admin_server``), files as a node leaves them
behind. Use these in tests of the daemon and of commands that need no process.
"""
