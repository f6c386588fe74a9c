"""Protocols of HTTP clients: a folder each, with the bodies it takes, the shape of its answers, and its handlers."""
