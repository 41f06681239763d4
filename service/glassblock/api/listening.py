"""The sockets that a service listens on: bound before it starts, so that a taken port is an ordinary refusal."""

import errno
import socket
from contextlib import ExitStack

from glassblock.errors import InvalidValue

_ADDRESS_FAULTS = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
"""What an address gives that this machine does not have."""


def listening_sockets(host: str, port: int) -> list[socket.socket]:
    """A listening socket for every address of `host`, all on one port.

    Args:
        host: an address, or a name: `localhost` may have one of IPv4 and one of IPv6.
        port: 0 takes a free one.

    Raises:
        InvalidValue: the port is taken or reserved, or the host is none of this machine's.
    """
    bound: list[socket.socket] = []
    absent: OSError | None = None
    with ExitStack() as undo:
        for family, address in _addresses(host, port):
            # The first decides the port for the others where a free one was asked for.
            chosen = bound[0].getsockname()[1] if bound else port
            try:
                listener = undo.enter_context(socket.create_server((address, chosen), family=family))
                # Every connection inherits it. Else the body of an answer waits, 40 ms, until its head is acknowledged:
                # asyncio takes the delay off by itself only where a socket's protocol was given by name.
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                bound.append(listener)
            except OSError as fault:
                if fault.errno not in _ADDRESS_FAULTS:
                    raise _refused(host, chosen, fault) from fault
                absent = fault
        if not bound:
            raise InvalidValue(
                f"cannot listen on {host}: it is no address of this machine",
                field="host",
                hint="listen on 127.0.0.1, for this machine alone",
            ) from absent
        undo.pop_all()
    return bound


def url_of(host: str, listener: socket.socket) -> str:
    """Where the service is asked."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}"


def _addresses(host: str, port: int) -> list[tuple[int, str]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as fault:  # UnicodeError: what no name can be, such as `a..b`
        raise InvalidValue(
            f"cannot listen on {host!r}: there is no such host", field="host", hint="give an address, such as 127.0.0.1"
        ) from fault
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))


def _refused(host: str, port: int, fault: OSError) -> InvalidValue:
    whys = {
        errno.EADDRINUSE: f"port {port} of {host} is taken",
        errno.EACCES: f"port {port} may not be taken by this user",
    }
    told = str(fault.strerror or fault).lower()
    return InvalidValue(
        whys.get(fault.errno or 0, f"cannot listen on port {port} of {host}: {told}"),
        field="port",
        hint="choose another with --port or GLASSBLOCK_PORT, 0 for a free one, or stop what listens there",
    )
