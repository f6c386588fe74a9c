"""The Backend protocol, its types and the loader that finds backends by entry point."""
