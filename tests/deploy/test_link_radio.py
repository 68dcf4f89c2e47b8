"""A radio that sleeps, on a virtual clock and on the emulated link."""

from __future__ import annotations

import asyncio
import time

import pytest
from echo_server import connected, echo_server

from outrider.deploy.link.link_process import LinkProcess
from outrider.deploy.link.link_relay import WAKE_S, Radio

SILENCE_S = 60.0


def test_a_radio_sleeps_after_silence_and_takes_its_time_to_wake() -> None:
    radio = Radio(idle_s=10.0, seed=1)
    wake_s = radio.use(0.0)
    assert WAKE_S[0] <= wake_s <= WAKE_S[1], "it is asleep at first"
    assert radio.use(0.1) == pytest.approx(wake_s - 0.1), "what comes meanwhile waits for the rest"
    assert radio.use(wake_s + 0.001) == 0.0
    assert radio.use(wake_s + 10.0) == 0.0, "ten seconds of silence are not over"
    again_s = radio.use(wake_s + 20.1)
    assert WAKE_S[0] <= again_s <= WAKE_S[1]
    assert again_s != wake_s


def test_the_time_awake_counts_from_when_the_radio_is_awake() -> None:
    radio = Radio(idle_s=0.1, seed=2)
    wake_s = radio.use(5.0)
    assert radio.use(5.0 + wake_s + 0.05) == 0.0


def test_the_same_seed_wakes_alike() -> None:
    def times(seed: int) -> list[float]:
        radio = Radio(1.0, seed)
        return [radio.use(10.0 * i) for i in range(5)]

    assert times(0) == times(0) != times(1)


def test_the_first_byte_after_silence_waits_for_the_radio_and_the_next_does_not() -> None:
    async def talk(link: LinkProcess) -> None:
        def times() -> list[float]:
            with connected(link.address, SILENCE_S) as edge:
                passed = []
                for pause_s in (0.0, 0.0, 1.0):
                    time.sleep(pause_s)
                    began = time.monotonic()
                    edge.sendall(b"x")
                    assert edge.recv(1) == b"x"
                    passed.append(time.monotonic() - began)
                return passed

        deadline = time.monotonic() + SILENCE_S
        while True:
            asleep, awake, again = await asyncio.to_thread(times)
            assert asleep >= 0.29
            assert again >= 0.29
            if awake < 0.29:
                return
            assert time.monotonic() < deadline, "the radio never was awake"
            await asyncio.sleep(1.0)

    async def run(echo: str) -> None:
        async with LinkProcess(echo, radio_idle_s=0.3) as link:
            await talk(link)

    with echo_server() as echo:
        asyncio.run(run(echo))
