"""The server's socket. Apart from the rest, so that a taken port is reported before torch is imported."""

from __future__ import annotations

import errno
import socket

from minispec.errors import ConfigError, MinispecError

_BACKLOG = 2048  # connections that wait to be accepted


class AddressError(MinispecError):
    """The address cannot be listened on."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Whoever connects waits until it is served, a few seconds at most.

    Raises:
        AddressError: the port is taken, or not allowed to this user.
        ConfigError: there is no such host.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"--host {host!r} is no address of this machine: {error}") from None
    sock = socket.socket(family, kind, proto)
    # Connections of a server that has just ended linger for a minute; they must not keep the next one from starting.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        # SO_REUSEADDR lets two sockets bind one port; only the second to listen on it is told that it is taken.
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} on {host} is in use; choose another with --port, or stop what uses it"
        elif error.errno == errno.EACCES:
            message = f"port {port} needs more rights than this user has; choose one above 1023 with --port"
        else:
            message = f"cannot listen on {host}:{port}: {error.strerror}; choose another --host or --port"
        raise AddressError(message) from None
    sock.setblocking(False)
    return sock


def url_of(sock: socket.socket) -> str:
    """``http://HOST:PORT`` with the real port, which --port 0 leaves to the system."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
