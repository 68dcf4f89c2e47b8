"""A wire between the networks of two processes: it carries IP packets later, and loses some.

    python -m research.cluster.packet_wire wan 1234 --delay 15 --loss 0.01

makes the device `wan` here and its other end, of the same name, in the network of process 1234, and carries until it is
ended. The kernel's TCP at both ends does with that what it does on a real link.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import random
import select
import struct
import subprocess
import time
from collections import deque
from contextlib import suppress

_TUNSETIFF, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001
_LARGEST = 1 << 16


def carry(ends: tuple[int, int], delay_s: float, loss: float, chance: random.Random) -> None:
    """Hand packets from each descriptor of `ends` to the other, for ever, `delay_s` seconds later."""
    ways = {ends[0]: deque[tuple[float, bytes]](), ends[1]: deque[tuple[float, bytes]]()}  # by where they come out
    while True:
        now = time.monotonic()
        dues = [way[0][0] for way in ways.values() if way]
        came, _, _ = select.select(ends, [], [], max(0.0, min(dues) - now) if dues else None)
        now = time.monotonic()
        for end in came:
            packet = os.read(end, _LARGEST)
            if chance.random() >= loss:
                ways[ends[1] if end == ends[0] else ends[0]].append((now + delay_s, packet))
        for end, way in ways.items():
            while way and way[0][0] <= now:
                with suppress(OSError):  # its network is down
                    os.write(end, way.popleft()[1])


def _device(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TUN_WITHOUT_HEADER))
    return device


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("other", type=int)
    parser.add_argument("--delay", type=float, default=0.0, help="ms of one way")
    parser.add_argument("--loss", type=float, default=0.0, help="share of the packets that are lost")
    given = parser.parse_args()
    far = _device("far")
    words = f"ip link set far netns {given.other} name {given.name}"
    subprocess.run(words.split(), check=True)  # noqa: S603 - fixed words
    near = _device(given.name)
    print("carries", flush=True)
    carry((near, far), given.delay / 1e3, given.loss, random.Random(1))


if __name__ == "__main__":
    main()
