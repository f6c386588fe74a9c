"""Composition root: builds a node's objects, supervises its children, shuts down in order."""
