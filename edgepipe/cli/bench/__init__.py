"""``edgepipe bench``: a client that measures a cluster."""
