"""Plain references to compare backends with: decoders, attention over pages and recurrent layers in numpy or float32,
outputs of transformers that are kept in ``tests/data``, and ``harness``, which chains backends in one process. Use
these when a test asks whether numbers are right.
"""
