"""Hosts and their network on one machine: namespaces, veth pairs and bridges, which end with this process.

A host has processes, a name, addresses, `/tmp/ray` and shared memory of its own, and the files of this machine. Nothing
leads from one to another network than those made here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from outrider.proto.errors import Unavailable

TOOLS = ("unshare", "nsenter", "setpriv", "ip", "nft", "sysctl", "pkill", "curl", "redis-server", "nginx")
_FIRST = """
set -e
hostname {name}
mkdir -p /tmp/ray
mount -t tmpfs tmpfs /tmp/ray
mount -t tmpfs tmpfs /dev/shm
mount --bind {hosts} /etc/hosts
ip link set lo up
sysctl -qw net.ipv6.conf.all.accept_dad=0 net.ipv6.conf.default.accept_dad=0
echo up
while read -rt 1; [ $? -gt 128 ]; do :; done
"""  # a shell, since it waits for orphans; it ends with its standard input, which is this process


def check_rights() -> None:
    """Raise `Unavailable`, with the remedy, where no hosts can be made."""
    if os.geteuid() != 0:
        raise Unavailable("network namespaces need root: run it as root")
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise Unavailable(f"{', '.join(missing)} cannot be run: install util-linux, iproute2, nftables and procps")


class Host:
    """One machine.

    Args:
        name: its host name.
        folder: of its logs, and of the file of all names.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._folder = folder
        words = ["unshare", "--net", "--uts", "--ipc", "--pid", "--mount", "--mount-proc", "--fork", "--kill-child"]
        first = _FIRST.format(name=name, hosts=folder / "hosts")
        self._first = subprocess.Popen(  # noqa: S603 - a fixed command
            [*words, "bash", "-c", first], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if self._first.stdout is None or self._first.stdout.readline() != "up\n":
            raise Unavailable(f"no namespaces can be made for {name}")
        children = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children").read_text(encoding="utf-8")
        self.pid = int(children.split()[0])

    def words(self, command: Sequence[str]) -> list[str]:
        """Return the command line that runs `command` there, in this checkout."""
        ends = ["setpriv", "--pdeathsig", "KILL"]  # with nsenter, which stays outside
        return ["nsenter", "--target", str(self.pid), "--all", f"--wd={os.getcwd()}", *ends, *command]

    def run(self, *command: str, within_s: float = 300, check: bool = True) -> str:
        """Run a command there and return its output; raises `Unavailable` where it fails."""
        try:
            done = subprocess.run(  # noqa: S603 - commands of this package
                self.words(command), capture_output=True, text=True, timeout=within_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise Unavailable(f"{self.name}: {' '.join(command)} takes more than {within_s:g} s") from error
        if check and done.returncode:
            raise Unavailable(f"{self.name}: {' '.join(command)} ends with {done.returncode}: {done.stderr[-2000:]}")
        return done.stdout

    def ip(self, line: str) -> None:
        """Run `ip` with the words of `line`, which may name another host by its `pid`."""
        self.net("ip", *line.split())

    def net_words(self, *command: str) -> list[str]:
        """Return the command line that runs `command` on its network alone."""
        return ["nsenter", "--target", str(self.pid), "--net", *command]

    def net(self, *command: str) -> None:
        """Run a command on its network alone, for which the processes are those of this machine."""
        done = subprocess.run(self.net_words(*command), capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode:
            raise Unavailable(f"{self.name}: {' '.join(command)}: {done.stderr.strip()}")

    def start(self, log: str, *command: str) -> subprocess.Popen[str]:
        """Start a command that goes on; it writes to `log`."""
        with (self._folder / f"{self.name}-{log}.log").open("a") as file:
            return subprocess.Popen(  # noqa: S603 - commands of this package
                self.words(command), stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True
            )

    def end(self) -> None:
        """End every process of it, as a power cut does."""
        self._first.kill()
        self._first.wait()
