"""Where commands print: lines fold at a terminal's edge and nowhere else."""

from __future__ import annotations

import sys

from rich.console import Console

_UNFOLDED = 10_000
"""Columns for output that is no terminal: rich would fold at 80 there, and break the lines that ``grep`` and
scripts read at a place that depends on how long a path is."""

console = Console(width=None if sys.stdout.isatty() else _UNFOLDED)
