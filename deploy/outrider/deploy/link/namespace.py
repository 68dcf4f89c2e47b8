"""Network namespaces with a TUN device each, by system calls: nothing of them outlives the process.

A thread that has left for a namespace of its own makes the sockets and the device there; whoever has their descriptors
may use them from any other thread. Needs Linux, and root or a user namespace.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from outrider.proto.errors import Unavailable

DEVICE = Path("/dev/net/tun")
MTU = 1500
REMEDY = (
    "run it as root, or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0); a container needs --cap-add SYS_ADMIN,NET_ADMIN"
)
DEVICE_REMEDY = "load the module tun (modprobe tun); a container needs --device /dev/net/tun"
DEVICE_RIGHTS = "run it as root, or let users open it (chmod 666 /dev/net/tun), as most distributions do"

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_CAPABILITIES = 1 << 21 | 1 << 12  # of the system's and the network's administrator
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFMTU = 0x8914, 0x8916, 0x891C, 0x8922
_IFF_UP = 1
_NAME = b"outrider"


def gain_rights() -> None:
    """Enter a user namespace where this process may not make network namespaces yet; call it before any thread starts.

    Raises:
        Unavailable: it is not allowed here, or there is no TUN device; the remedy is named.
    """
    if not DEVICE.exists():
        raise Unavailable(f"there is no {DEVICE}; {DEVICE_REMEDY}", field="tun")
    if not os.access(DEVICE, os.R_OK | os.W_OK):
        raise Unavailable(f"{DEVICE} may not be opened by this user; {DEVICE_RIGHTS}", field="tun")
    if _has_capabilities():
        return
    user, group = os.geteuid(), os.getegid()
    try:
        _unshare(_CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny", encoding="utf-8")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1", encoding="utf-8")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1", encoding="utf-8")
    except OSError as error:
        raise Unavailable(f"user namespaces are not allowed here: {error.strerror}; {REMEDY}", field="tun") from error


class Namespace:
    """A network namespace with one TUN device, until `close`.

    Attributes:
        address: IPv4 address of the device.
        device: descriptor from which packets that leave the namespace are read, and to which others are written.

    Raises:
        Unavailable: it is not allowed here; the remedy is named.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._inside = ThreadPoolExecutor(1, "namespace")
        try:
            self.device = self._inside.submit(_set_up, address).result()
        except OSError as error:
            self._inside.shutdown()
            raise Unavailable(
                f"network namespaces with TUN devices are not allowed here: {error.strerror}; {REMEDY}", field="tun"
            ) from error

    def new_socket(self, family: int, kind: int = socket.SOCK_STREAM) -> socket.socket:
        """Return a socket of this namespace, for TCP unless `kind` is another, that is not connected, nor blocks."""
        made = self._inside.submit(socket.socket, family, kind).result()
        made.setblocking(False)
        return made

    def close(self) -> None:
        """Give up device and thread; the namespace ends with its last socket."""
        self._inside.shutdown()
        os.close(self.device)


def _set_up(address: str) -> int:
    """Leave for a new namespace with this thread, and return the descriptor of a new device there."""
    _unshare(_CLONE_NEWNET)
    device = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", _NAME, _IFF_TUN | _IFF_NO_PI))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            for request, inet in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, "255.255.255.252")):
                value = struct.pack("16sHH4s16x", _NAME, socket.AF_INET, 0, socket.inet_aton(inet))
                fcntl.ioctl(control, request, value)
            fcntl.ioctl(control, _SIOCSIFMTU, struct.pack("16si20x", _NAME, MTU))
            fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH22x", _NAME, _IFF_UP))
    except OSError:
        os.close(device)
        raise
    return device


def _has_capabilities() -> bool:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    effective = next(line for line in lines if line.startswith("CapEff:"))
    return int(effective.split()[1], 16) & _CAPABILITIES == _CAPABILITIES


def _unshare(flags: int) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(flags):
        number = ctypes.get_errno()
        text = "the process has threads already" if number == errno.EINVAL else os.strerror(number)
        raise OSError(number, text)
