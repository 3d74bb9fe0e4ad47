"""What the benchmarks share: the command line, the report, medians, and text to read.

Import this module before ``mlx.core``: it loads the fast BLAS first, as the engine does.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from offbook.runtime.models.blas import preload_blas

BLAS = preload_blas()

import mlx.core as mx  # noqa: E402  (after the BLAS)

if not mx.is_available(mx.gpu):
    mx.set_default_device(mx.Device(mx.cpu))

EMBEDDED = "wheel:smollm2-135m-instruct"

console = Console(width=int(os.environ.get("COLUMNS", "120")))


def arguments(description: str, *, full: bool = False, png: bool = False) -> argparse.Namespace:
    """The flags every benchmark has: ``--quick``, ``--json OUT`` and, for some, ``--full`` and ``--png``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer repeats and sizes, for a first look")
    parser.add_argument("--json", metavar="OUT", help="write the result, with a flat 'summary', to this file")
    if full:
        parser.add_argument("--full", action="store_true", help="larger sizes too")
    if png:
        parser.add_argument("--png", metavar="FILE", type=Path, help="draw the run's timeline (matplotlib)")
    return parser.parse_args()


def report(arguments: argparse.Namespace, summary: dict[str, Any], **detail: Any) -> None:
    """Print the summary and write the JSON file. What is no number there is null."""
    console.print_json(json.dumps(_finite(summary)))
    if arguments.json:
        result = _finite({"summary": summary, "machine": machine(), **detail})
        Path(arguments.json).write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "cores": cores(),
        "device": str(mx.default_device()),
        "blas": getattr(BLAS, "source", str(BLAS)),
        "python": sys.version.split()[0],
        "load": os.getloadavg()[0],
        "noise": noise(),
    }


def noise(repeats: int = 30) -> float:
    """How unsteady the machine is now: interquartile range over median of a small fixed product."""
    a = mx.random.normal((384, 384))
    mx.eval(a, a @ a)
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        mx.eval(a @ a)
        times.append(time.perf_counter() - started)
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / middle


def timed(work: Callable[[], Any]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def interleaved(variants: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """A B A B ...: each variant's values, in order of repeats."""
    values: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, run in variants.items():
            values[name].append(run())
    return values


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> str:
    """Median and range, for a table."""
    return f"{median(values):.1f} ({min(values):.1f}-{max(values):.1f})"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    out = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        out.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        out.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row))
    console.print(out)


def prose() -> str:
    """English text that comes with Python: the topics of ``help()``, about 700 KB."""
    from offbook.runtime.kv import calibrate

    return calibrate.prose()


def slices(ids: Sequence[int], length: int, *, start: int = 0) -> Iterator[list[int]]:
    """Fresh, non-overlapping slices of a token stream, for ever (it starts over at its end)."""
    at = start
    while True:
        if at + length > len(ids):
            at = start
        yield list(ids[at : at + length])
        at += length
