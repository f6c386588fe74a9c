"""Shapes of models that people know by name: the sizes in their published ``config.json``, and the loader."""
