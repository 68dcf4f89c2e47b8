"""Pictures of what verifiers hold: a panel for each verifier's prices, a line for each scheme."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from outrider.bench.bench_metrics import grouped
from outrider.bench.bench_results import DPI, STYLE
from outrider.bench.record import write

# Colour, line and marker by scheme: nothing depends on colour alone. The colours are those of Okabe and Ito.
LINES = {
    "cloud streaming": ("#7a7a7a", "--", "s"),
    "centralised drafting": ("#222222", "-", "v"),
    "edges in rounds": ("#d55e00", "-", "^"),
    "rounds, by deadline": ("#cc79a7", ":", "D"),
    "Outrider, edges alone": ("#b88600", "--", "o"),
    "Outrider, both ends": ("#0072b2", "-", "o"),
}


def plot(rows: Sequence[Mapping[str, Any]], path: Path, *, by_sessions: bool) -> None:
    """Draw sessions held by the round trip, or tokens a second by the number of sessions, with the first device.

    The ending of the file names its format. Raises `ConfigError` where it cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure  # has the Agg canvas: no pyplot, no display, no global state

    panels = grouped([row for row in rows if row["device"] == rows[0]["device"]], lambda row: row["prices"])
    along, value = ("sessions", "tokens_per_card_second") if by_sessions else ("rtt_ms", "sessions")
    ticks = sorted({row[along] for row in rows if row["rtt_ms"]})
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(max(7.5, 4.2 * len(panels)), 4.2), layout="constrained")
        for axes, (prices, own) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
            for scheme, found in grouped(own, lambda row: row["scheme"]).items():
                colour, line, marker = LINES[scheme]
                points = [(row[along], row[value]) for row in found]
                if len(points) == 1 and not by_sessions:  # it waits for no edge
                    points = [(tick, points[0][1]) for tick in ticks]
                axes.plot(*zip(*points, strict=True), color=colour, linestyle=line, marker=marker, label=scheme)
            axes.set_xscale("log")
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.minorticks_off()
            axes.set_ylim(bottom=0)
            axes.set_xlabel("sessions at once" if by_sessions else "round-trip time (ms)")
            axes.set_ylabel("tokens per second of a card" if by_sessions else "sessions held")
            axes.set_title(f"prices {prices}", loc="left")
        handles, names = axes.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower left", ncols=3, handlelength=2.6)
        drawn = BytesIO()
        figure.savefig(drawn, format=path.suffix.removeprefix("."), dpi=DPI)
    write(path, lambda: path.write_bytes(drawn.getvalue()), "plot")
