"""Main functions of the daemon's child processes: engine, stage, gateway. The daemon imports only their settings."""
