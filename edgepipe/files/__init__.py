"""Files and JSON from outside: bounded reads, strict JSON, checked fields and paths, copies, free space."""
