"""Keys, certificates, mutual TLS, and the rules on which process may call which RPC method.

This package opens no sockets. ``link`` and everything above may import it."""
