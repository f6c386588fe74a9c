"""PURE: decides which nodes compute which layers."""
