"""`outrider link`, an emulated link until a signal ends it."""

from __future__ import annotations

from outrider.deploy.arguments import Given
from outrider.deploy.commands.operating import LinkSettings
from outrider.deploy.link.link_relay import LinkRelay, Radio, run_on_time
from outrider.deploy.link.link_traces import LinkTrace, find_trace
from outrider.deploy.link.shape import LinkShape
from outrider.deploy.process.termination import set_when_asked_to_end
from outrider.proto.errors import ConfigError

RADIO_IDLE_S = 10.0  # silence after which the radio sleeps


def link(given: Given) -> int:
    """Run `outrider link`."""
    options = given(LinkSettings)
    trace = _trace(options)
    shape = LinkShape.of(
        rtt_ms=options.rtt or 0.0, jitter_ms=options.jitter, up_mbit=options.up, down_mbit=options.down
    )
    return run_on_time(_link(options, shape, trace))


async def _link(options: LinkSettings, shape: LinkShape, trace: LinkTrace | None) -> int:
    radio = Radio(RADIO_IDLE_S, options.seed) if options.radio else None
    relay = LinkRelay(options.to, shape, options.seed, radio)
    address = await relay.start(options.listen)
    stop = set_when_asked_to_end()
    print(f"link to {options.to} on {address}", flush=True)
    if trace is not None:
        relay.play(trace)
    await stop.wait()
    counters = relay.counters
    await relay.stop()
    print(f"{counters.connections} connection(s), {counters.up_bytes} bytes up, {counters.down_bytes} bytes down")
    return 0


def _trace(options: LinkSettings) -> LinkTrace | None:
    if options.trace is None:
        return None
    fixed = [name for name in ("rtt", "up", "down") if getattr(options, name) is not None]
    if fixed:
        given = ", ".join(f"--{name}" for name in fixed)
        raise ConfigError(f"says what {given} would say too; give either", field="trace")
    return find_trace(options.trace)
