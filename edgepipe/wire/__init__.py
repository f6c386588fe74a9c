"""Every message between processes as a value, and the conversion between values and protobuf (``wire.v1``).

Decisions about messages live elsewhere. Other packages import the values. Only the services that send and receive
import ``wire.v1``.
"""
