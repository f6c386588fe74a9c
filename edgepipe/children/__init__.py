"""Child processes for work that needs a limit on time or memory or holds the interpreter; users' turns at them."""
