"""Counters and histograms of an engine, cheap enough for every step.

A histogram keeps counts in fixed buckets (milliseconds, powers of two), so that percentiles of a long
run cost nothing to keep; its percentiles are right within a bucket's width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, MutableMapping

BUCKETS = 24
"""Up to 2**23 ms, about two hours; the first bucket is below one millisecond."""


class Histogram:
    """Counts of durations in milliseconds."""

    def __init__(self) -> None:
        self.counts = [0] * BUCKETS
        self.total = 0.0

    def add(self, milliseconds: float) -> None:
        bucket = 0 if milliseconds < 1 else min(BUCKETS - 1, int(math.log2(milliseconds)) + 1)
        self.counts[bucket] += 1
        self.total += milliseconds

    @property
    def count(self) -> int:
        return sum(self.counts)

    def percentile(self, share: float) -> float:
        """The value below which ``share`` (0 to 1) of all lie: the upper edge of its bucket."""
        wanted = share * self.count
        seen = 0
        for bucket, count in enumerate(self.counts):
            seen += count
            if count and seen >= wanted:
                return float(2**bucket)
        return 0.0


class Metrics(MutableMapping[str, float]):
    """Counters by name, with histograms beside them. Used on the step thread."""

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self.histograms: dict[str, Histogram] = {}

    def count(self, name: str, by: float = 1) -> None:
        self._counters[name] = self._counters.get(name, 0) + by

    def observe(self, name: str, milliseconds: float) -> None:
        self.histograms.setdefault(name, Histogram()).add(milliseconds)

    def flat(self) -> dict[str, float]:
        """All counters, and count, mean, p50 and p95 of every histogram."""
        out = dict(self._counters)
        for name, histogram in self.histograms.items():
            if histogram.count:
                out[f"{name}.count"] = histogram.count
                out[f"{name}.mean"] = histogram.total / histogram.count
                out[f"{name}.p50"] = histogram.percentile(0.5)
                out[f"{name}.p95"] = histogram.percentile(0.95)
        return out

    def __getitem__(self, name: str) -> float:
        return self._counters[name]

    def __setitem__(self, name: str, value: float) -> None:
        self._counters[name] = value

    def __delitem__(self, name: str) -> None:
        del self._counters[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._counters)

    def __len__(self) -> int:
        return len(self._counters)
