"""``edgepipe setup``: from a bare machine to a private cluster that answers, in six steps."""
