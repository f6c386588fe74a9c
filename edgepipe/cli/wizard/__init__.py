"""``edgepipe setup``: from a bare machine to a private cluster that answers, in at most six questions."""
