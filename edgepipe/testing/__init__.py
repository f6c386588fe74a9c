"""Helpers for tests, typed and public: a fake clock, tiny models, steps by hand, the LAN lab."""
