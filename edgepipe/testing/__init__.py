"""A clock to turn by hand, and tiny models: for tests of programs that use edgepipe."""
