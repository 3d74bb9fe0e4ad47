"""What a broker counts."""

from __future__ import annotations

import msgspec


class BrokerStatistics(msgspec.Struct, kw_only=True):
    """Counters since the broker started, and what is there now.

    Attributes:
        kinds: the kinds of addresses that are served now, in order.
    """

    peers: int = 0
    patterns: int = 0
    pending: int = 0
    queued: int = 0
    subscriptions: int = 0
    received: int = 0
    requests: int = 0
    delivered: int = 0
    answers: int = 0
    progress: int = 0
    late_replies: int = 0
    failed: int = 0
    cancelled: int = 0
    published: int = 0
    repeated_publications: int = 0
    events: int = 0
    malformed: int = 0
    refused: int = 0
    disconnected: int = 0
    lost: int = 0
    kinds: tuple[str, ...] = ()
