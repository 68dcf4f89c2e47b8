"""`outrider link`, an emulated link until a signal ends it; and `outrider import-trace`, recordings for it."""

from __future__ import annotations

from outrider.deploy.arguments import Given
from outrider.deploy.commands.operating import LinkSettings, RecordingSettings
from outrider.deploy.link.process import open_link
from outrider.deploy.link.recordings import trace_of
from outrider.deploy.link.relay import run_on_time
from outrider.deploy.link.shape import LinkShape, PacketFaults
from outrider.deploy.link.traces import LinkTrace, find_trace, write_trace
from outrider.deploy.process.termination import set_when_asked_to_end
from outrider.proto.errors import ConfigError


def link(given: Given) -> int:
    """Run `outrider link`."""
    options = given(LinkSettings)
    trace = _trace(options)
    shape = LinkShape.of(
        rtt_ms=options.rtt or 0.0,
        jitter_ms=options.jitter,
        up_mbit=options.up,
        down_mbit=options.down,
        queue_kib=options.queue,
    )
    faults = PacketFaults(options.loss, options.reorder / 100) if options.tun else None
    return run_on_time(_link(options, shape, trace, faults))


async def _link(options: LinkSettings, shape: LinkShape, trace: LinkTrace | None, faults: PacketFaults | None) -> int:
    radio_idle_s = options.radio_idle_s if options.radio else None
    relay = open_link(options.to, shape, options.seed, faults=faults, radio_idle_s=radio_idle_s)
    address = await relay.start(options.listen)
    stop = set_when_asked_to_end()
    print(f"link to {options.to} on {address}", flush=True)
    if trace is not None:
        relay.play(trace)
    await stop.wait()
    counters = relay.counters
    await relay.stop()
    packets = f", {counters.packets_lost} packets lost, {counters.packets_dropped} dropped" if faults else ""
    print(
        f"{counters.connections} connection(s), {counters.up_bytes} bytes up, {counters.down_bytes} bytes down{packets}"
    )
    return 0


def import_trace(given: Given) -> int:
    """Run `outrider import-trace`."""
    options = given(RecordingSettings)
    trace = trace_of(options.down, options.up, rtt_ms=options.rtt, step_ms=options.step_ms)
    try:
        write_trace(trace, options.output, f"Made from {options.down.name} by outrider import-trace.")
    except OSError as error:
        raise ConfigError(f"cannot write {options.output}: {error.strerror}", field="output") from error
    print(f"{options.output}: {trace.duration_s:g} s in {len(trace.points)} points")
    return 0


def _trace(options: LinkSettings) -> LinkTrace | None:
    if options.trace is None:
        return None
    fixed = [name for name in ("rtt", "up", "down") if getattr(options, name) is not None]
    if fixed:
        given = ", ".join(f"--{name}" for name in fixed)
        raise ConfigError(f"says what {given} would say too; give either", field="trace")
    return find_trace(options.trace)
