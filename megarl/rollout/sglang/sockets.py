"""TCP between a rank and a server of its own: how the death of the other machine is noticed."""

from __future__ import annotations

import os
import socket
import struct
from multiprocessing.connection import Connection

_IDLE_S, _INTERVAL_S, _PROBES = 30, 10, 3
"""A machine that is gone closes no connection. The system asks it after this long a silence, this often."""
_UNSENT_MS = 60_000
"""How long what was sent may stay without the other machine's acknowledgement."""


def as_connection(peer: socket.socket) -> Connection:
    """A connection that ends when the other side's process or machine does; takes the socket over."""
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL_S)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNSENT_MS)
    return Connection(peer.detach())


def limit_reads(connection: Connection, limit_s: int | None) -> None:
    """Has each read end with `BlockingIOError` where nothing comes for so long, be it in the middle of a message.

    Args:
        limit_s: None: a read waits for ever, as it does at first.
    """
    with socket.socket(fileno=os.dup(connection.fileno())) as peer:  # a copy of the number, of the same socket
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", limit_s or 0, 0))
