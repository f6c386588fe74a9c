"""``edgepipe doctor``: examines machines and reports problems with remedies."""
