"""PURE: which nodes compute which layers."""
