"""A PNG timeline of an engine at work: ten agents, memory for three, loads under decodes.

``python -m benchmarks.timeline --png OUT [--trace FILE]`` runs a short scene (or reads a trace written
with ``trace=``) and draws the step thread, the loads and every agent's phases.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

COLOURS = {"queued": "#c9c9c9", "load": "#e8a33d", "prefill": "#4c78a8", "decode": "#59a14f"}


def scene(trace: Path) -> None:
    """Ten agents of 700 tokens take turns with memory for three."""
    from benchmarks.team import QUESTION, Reader, Team, budget_for, load_embedded

    loaded = load_embedded()
    reader, order = Reader(loaded), random.Random(1)
    agents = [f"agent {i}" for i in range(10)]
    with Team(loaded, budget_for(loaded, agents=3, tokens=1024), trace=trace) as team:
        for agent in agents:
            team.say(agent, reader.text(600) + QUESTION, max_tokens=8)
        speakers = [order.choice(agents) for _ in range(24)]
        for at in range(0, len(speakers), 2):
            for agent in speakers[at + 2 : at + 4]:  # their messages wait already
                team.prefetch(agent)
            turns = [team.ask(a, "Go on.", max_tokens=16) for a in dict.fromkeys(speakers[at : at + 2])]
            for turn in turns:
                turn.reply.result()


def draw(events: list[dict[str, Any]], png: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    spans = [e for e in events if e["ph"] == "X"]
    end = max(e["ts"] + e["dur"] for e in spans)
    since = max(0.0, end - 12e6)  # the last twelve seconds: turns with memory on disk
    order = sorted(names)
    figure, axes = plt.subplots(figsize=(14, 0.45 * len(order) + 1.2))
    for event in spans:
        if event["ts"] + event["dur"] < since:
            continue
        kind = event["name"].split()[0] if event["tid"] != 2 else "load"
        y = len(order) - order.index(event["tid"])
        axes.barh(
            y,
            event["dur"] / 1e6,
            left=(event["ts"] - since) / 1e6,
            color=COLOURS.get(kind, "#888"),
            height=0.8,
        )
    axes.set_yticks(range(len(order), 0, -1), [names[t] for t in order])
    axes.set_xlabel("seconds")
    for kind, colour in COLOURS.items():
        axes.barh(0, 0, color=colour, label=kind)
    axes.legend(loc="upper right", ncols=4)
    axes.set_xlim(0, (end - since) / 1e6)
    figure.tight_layout()
    figure.savefig(png, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--png", type=Path, default=Path("timeline.png"))
    parser.add_argument("--trace", type=Path, help="draw this trace instead of running a scene")
    arguments = parser.parse_args()
    from offbook.runtime.observe.trace import read

    if arguments.trace is not None:
        draw(read(arguments.trace), arguments.png)
        return
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        scene(trace)
        draw(read(trace), arguments.png)
    print(f"wrote {arguments.png}")


if __name__ == "__main__":
    main()
