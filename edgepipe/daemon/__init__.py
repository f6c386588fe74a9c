"""Composition root: builds a node's objects, supervises its children, shuts down in order."""

from edgepipe.config import prepare_environment

prepare_environment()  # gRPC reads its settings when it is imported, so this comes before every import below
