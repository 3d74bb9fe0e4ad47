"""A trace of the engine's work in the Chrome/Perfetto format.

One track for the step thread (decode steps and prefill chunks), one for loads from disk, and one per
agent (its turns by phase), so that a reader sees one agent's load lying under another's decode. Open
the file at ui.perfetto.dev or chrome://tracing. The format is the trace-event JSON array, which may
lack its end: a killed engine leaves a readable trace, and the next one keeps it under another name.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from pathlib import Path
from typing import Any, TextIO

STEP_TRACK, LOAD_TRACK, FIRST_AGENT_TRACK = 1, 2, 10
FLUSH_EVENTS = 256


class Trace:
    """Writes spans as they end. Thread-safe; times are ``time.monotonic()`` seconds.

    Args:
        path: the file. One that is there already, of an engine before this one, is kept as ``earlier`` says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() and path.stat().st_size:
            path.rename(earlier(path))
        self._file: TextIO = path.open("w", encoding="utf-8")
        self._file.write("[\n")
        self._between = ""
        self._lock = threading.Lock()
        self._origin = time.monotonic()
        self._tracks: dict[str, int] = {}
        self._pending = 0
        for number, name in ((STEP_TRACK, "step thread"), (LOAD_TRACK, "loads from disk")):
            self._name(number, name)

    def step(self, name: str, start: float, end: float, **facts: Any) -> None:
        """Something the step thread did."""
        self._span(STEP_TRACK, name, start, end, facts)

    def load(self, name: str, start: float, end: float, **facts: Any) -> None:
        """A load from disk."""
        self._span(LOAD_TRACK, name, start, end, facts)

    def agent(self, agent: str, name: str, start: float, end: float, **facts: Any) -> None:
        """A phase of an agent's turn."""
        track = self._tracks.get(agent)
        if track is None:
            track = self._tracks[agent] = FIRST_AGENT_TRACK + len(self._tracks)
            self._name(track, agent)
        self._span(track, name, start, end, facts)

    def close(self) -> None:
        with self._lock:
            if not self._file.closed:
                self._file.write("\n]\n")
                self._file.close()

    def _name(self, track: int, name: str) -> None:
        event = {"ph": "M", "name": "thread_name", "pid": os.getpid(), "tid": track, "args": {"name": name}}
        self._write(event)

    def _span(self, track: int, name: str, start: float, end: float, facts: dict[str, Any]) -> None:
        self._write(
            {
                "ph": "X",
                "name": name,
                "pid": os.getpid(),
                "tid": track,
                "ts": round((start - self._origin) * 1e6, 1),
                "dur": round(max(0.0, end - start) * 1e6, 1),
                "args": facts,
            }
        )

    def _write(self, event: dict[str, Any]) -> None:
        with self._lock:
            if self._file.closed:
                return
            self._file.write(self._between + json.dumps(event, separators=(",", ":")))
            self._between = ",\n"
            self._pending += 1
            if self._pending >= FLUSH_EVENTS:
                self._pending = 0
                self._file.flush()


def earlier(path: Path) -> Path:
    """The first free name for an earlier trace: ``trace.json`` becomes ``trace.1.json``, the next one 2."""
    names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a trace file, also of one that was cut off."""
    text = path.read_text(encoding="utf-8").strip().rstrip(",")
    whole_lines = text[: text.rfind("\n")].rstrip().rstrip(",")
    for candidate in (text, text + "]", whole_lines + "]"):
        try:
            events: list[dict[str, Any]] = json.loads(candidate)
        except json.JSONDecodeError:
            continue
        return events
    raise ValueError(f"{path} is no trace")
