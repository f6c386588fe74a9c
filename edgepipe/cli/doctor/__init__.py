"""``edgepipe doctor``: examines machines and says what is wrong."""
