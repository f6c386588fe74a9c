"""Which models are served, where their stages are, and who says so. The top wing of ``daemon``."""
