"""The transport over TCP: `TcpServer` lets others read, `TcpPeers` reads from them.

A file's bytes go from the RAM tier of one node to that of another in this order: `client` asks, `server` finds the file
by its version, `bulk` sends it with sendfile, and at the other end receives, sums up and writes it; `connection` and
`frames` are between, `hello` and `credentials` say who may.
"""

from tierfs.transport.client import TcpPeers
from tierfs.transport.server import TcpServer

__all__ = ["TcpPeers", "TcpServer"]
