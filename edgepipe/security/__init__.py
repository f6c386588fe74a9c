"""Who may call whom: keys, certificates, mutual TLS, and rules for RPC methods.

It opens no sockets. ``link`` and everything above may import it."""
