"""Status messages to systemd: the datagram of sd_notify(3), for units of `Type=notify`.

Twenty lines replace a dependency: one package on PyPI has had no release since 2017, the other
needs systemd's C headers to install.
"""

import os
import socket


def notify(state: str) -> bool:
    """Send `state` ("READY=1", "STOPPING=1", "STATUS=..."); return whether systemd received it."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):  # the abstract namespace
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        try:
            channel.sendto(state.encode(), address)
        except OSError:
            return False
    return True
