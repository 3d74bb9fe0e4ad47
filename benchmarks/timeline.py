"""A PNG timeline of an engine at work: ten agents, memory for three, loads under others' decoding.

``python -m benchmarks.timeline --png OUT [--trace FILE]`` runs a short scene (or reads a trace written
with ``trace=``) and draws the step thread, the loads and every agent's phases, around the seconds in which
most loads lie under other agents' decoding.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

COLOURS = {
    "queued": "#d9d9d9",
    "load": "#e8862e",
    "prefill": "#4c78a8",
    "decode": "#8cc084",
}
SECONDS = 2.5
HEIGHT, LABEL_SECONDS = 0.7, 0.1


class Span(NamedTuple):
    """A piece of a lane; times in seconds of the trace."""

    lane: str
    kind: str
    start: float
    end: float
    owner: str = ""
    part: str = "all"
    """``upper`` or ``lower`` half of the lane for the two sides of a joint step."""


def scene(trace: Path) -> None:
    """Ten agents of 700 tokens take turns with memory for three."""
    from benchmarks.team import QUESTION, Reader, Team, budget_for, load_embedded

    loaded = load_embedded()
    reader, order = Reader(loaded), random.Random(1)
    agents = [f"agent {i}" for i in range(10)]
    with Team(loaded, budget_for(loaded, agents=3, tokens=1024), trace=trace) as team:
        for agent in agents:
            team.say(agent, reader.text(600) + QUESTION, max_tokens=8)
        team.evict(*agents)
        speakers = [order.choice(agents) for _ in range(24)]
        for at in range(0, len(speakers), 2):
            turns = [
                team.ask(agent, "Go on.", max_tokens=16, ignore_end=True)
                for agent in dict.fromkeys(speakers[at : at + 2])
            ]
            while not all(turn.times for turn in turns):
                time.sleep(0.002)
            for agent in speakers[at + 2 : at + 4]:  # their messages come while these speak
                team.prefetch(agent)
            for turn in turns:
                turn.reply.result()


def spans_of(events: list[dict[str, Any]]) -> Iterator[Span]:
    """The trace's spans, joint steps as their two sides, loads also on their owner's lane."""
    from offbook.runtime.observe.trace import LOAD_TRACK

    lanes = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    for event in events:
        if event["ph"] != "X":
            continue
        name, lane = str(event["name"]), lanes[event["tid"]]
        start = event["ts"] / 1e6
        end = start + event["dur"] / 1e6
        if event["tid"] == LOAD_TRACK:
            yield Span(lane, "load", start, end, owner=name)
            if name in lanes.values():
                yield Span(name, "load", start, end)
        elif " + " in name:
            for part, side in zip(("upper", "lower"), name.split(" + "), strict=True):
                yield Span(lane, side.split()[0], start, end, part=part)
        else:
            yield Span(lane, name.split()[0], start, end)


def interesting(spans: list[Span]) -> float:
    """Where the ``SECONDS`` begin in which most loads have another agent's decoding over them."""
    decodes = [s for s in spans if s.kind == "decode" and not s.lane.startswith("step")]
    loads = [
        s
        for s in spans
        if s.owner and any(d.lane != s.owner and d.start < s.end and s.start < d.end for d in decodes)
    ]
    if not loads:
        return max(0.0, max(s.end for s in spans) - SECONDS)
    before = 0.1 * SECONDS
    most = max(loads, key=lambda a: sum(a.start <= b.start < a.start + SECONDS - before for b in loads))
    return max(0.0, most.start - before)


def draw(events: list[dict[str, Any]], png: Path, title: str) -> None:
    """Draw the interesting part of a trace."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    every = list(spans_of(events))
    since = interesting(every)
    spans = [s for s in every if s.end > since and s.start < since + SECONDS]
    names = [e["args"]["name"] for e in sorted(events, key=lambda e: e.get("tid", 0)) if e["ph"] == "M"]
    lanes = [name for name in names if any(s.lane == name for s in spans)]
    figure, axes = plt.subplots(figsize=(15, 0.55 * len(lanes) + 1.8), layout="constrained")
    for span in spans:
        y = lanes.index(span.lane)
        middle = {"upper": y - HEIGHT / 4, "lower": y + HEIGHT / 4}.get(span.part, y)
        axes.barh(
            middle,
            span.end - span.start,
            left=span.start - since,
            height=HEIGHT if span.part == "all" else HEIGHT / 2,
            color=COLOURS.get(span.kind, "#888888"),
            edgecolor="white",
            linewidth=0.3,
            zorder=3 if span.kind == "load" else 2,
        )
    label_loads(axes, spans, since, lanes)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.5, -0.6)
    axes.set_xlim(0, SECONDS)
    axes.set_xlabel("seconds")
    axes.grid(axis="x", color="#eeeeee", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, loc="left", fontsize=13)
    figure.legend(
        handles=[Patch(color=colour, label=kind) for kind, colour in COLOURS.items()],
        loc="outside lower center",
        ncols=len(COLOURS),
        frameon=False,
    )
    figure.savefig(png, dpi=110)
    plt.close(figure)


def label_loads(axes: Any, spans: list[Span], since: float, lanes: list[str]) -> None:
    """Whose each load is, above it (neighbours together), and a line from it down to its owner's lane."""
    together: list[list[Span]] = []
    for span in sorted((s for s in spans if s.owner), key=lambda s: s.start):
        if together and span.start < max(s.end for s in together[-1]) + LABEL_SECONDS:
            together[-1].append(span)
        else:
            together.append([span])
        if span.owner in lanes and span.start >= since:
            x, ends = span.start - since, (lanes.index(span.lane), lanes.index(span.owner))
            axes.plot([x, x], ends, color=COLOURS["load"], lw=0.8, ls=":", zorder=1)
    for loads in together:
        middle = (loads[0].start + max(s.end for s in loads)) / 2 - since
        names = ", ".join(dict.fromkeys(s.owner for s in loads))
        axes.text(
            min(max(middle, LABEL_SECONDS / 2), SECONDS - LABEL_SECONDS / 2),
            lanes.index(loads[0].lane) - HEIGHT / 2,
            names,
            ha="center",
            va="bottom",
            fontsize=7.5,
            zorder=4,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--png", type=Path, default=Path("timeline.png"))
    parser.add_argument("--trace", type=Path, help="draw this trace instead of running a scene")
    arguments = parser.parse_args()
    from offbook.runtime.observe.trace import read

    if arguments.trace is not None:
        draw(read(arguments.trace), arguments.png, f"An engine at work ({arguments.trace.name})")
    else:
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            scene(trace)
            title = "Ten agents, memory for three: loads from disk lie under other agents' decoding"
            draw(read(trace), arguments.png, title)
    print(f"wrote {arguments.png}")


if __name__ == "__main__":
    main()
