"""A clock that stands still until told, and tiny models: for tests of programs that use edgepipe."""
