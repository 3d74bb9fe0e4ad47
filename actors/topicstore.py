"""Topics in the journal: the durable store that a broker keeps events in.

Owns retention. Numbers have no gaps; the newest events are retained, and publication ids are remembered
longer than their events, so that publishing the same id again has no second effect.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence

from offbook.bus.topics import TOPICS, Event, Record, check_topic_count

from .journal import Journal


class JournalTopicStore:
    """A ``TopicStore`` (see ``offbook.bus.topics``) in a journal.

    Args:
        retain: events kept per topic.
        remember: publication ids kept per topic.
        max_topics: topics that there may be.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        retain: int = 10_000,
        remember: int = 100_000,
        max_topics: int = TOPICS,
    ) -> None:
        self._journal = journal
        self._retain = retain
        self._remember = remember
        self._max_topics = max_topics

    async def append(self, topic: str, records: Sequence[Record]) -> list[int]:
        """Retain events; returns their numbers once they are on disk.

        Raises:
            JournalFailed: they are not.
            TooManyTopics: the topic is new, and there are as many as are kept.
        """
        return await self._journal.do("publish", lambda db: self._append(db, topic, records), admits=True)

    async def read(self, topic: str, after: int, limit: int) -> list[Event]:
        """Up to ``limit`` retained events after a number."""
        rows = await self._journal.do(
            "read-topic",
            lambda db: db.execute(
                "SELECT seq, id, type, sender, traceparent, body FROM topics WHERE topic=? AND seq>? "
                "ORDER BY seq LIMIT ?",
                (topic, after, limit),
            ).fetchall(),
        )
        return [
            Event(seq=seq, id=id_, type=type_, sender=sender, traceparent=trace, body=body)
            for seq, id_, type_, sender, trace, body in rows
        ]

    async def bounds(self, topic: str) -> tuple[int, int]:
        """The first retained and the last number."""
        return await self._journal.do("topic-bounds", lambda db: self._bounds(db, topic))

    def _bounds(self, db: sqlite3.Connection, topic: str) -> tuple[int, int]:
        last = self._last(db, topic)
        (first,) = db.execute("SELECT MIN(seq) FROM topics WHERE topic=?", (topic,)).fetchone()
        return (last + 1 if first is None else int(first)), last

    @staticmethod
    def _last(db: sqlite3.Connection, topic: str) -> int:
        row = db.execute("SELECT seq FROM topic_heads WHERE topic=?", (topic,)).fetchone()
        return 0 if row is None else int(row[0])

    def _append(self, db: sqlite3.Connection, topic: str, records: Sequence[Record]) -> list[int]:
        last = self._last(db, topic)
        if not last:
            (count,) = db.execute("SELECT COUNT(*) FROM topic_heads").fetchone()
            check_topic_count(count, self._max_topics, topic)
        numbers = []
        now = time.time()
        for record in records:
            known = db.execute(
                "SELECT seq FROM topic_ids WHERE topic=? AND id=?", (topic, record.id)
            ).fetchone()
            if known is not None:
                numbers.append(int(known[0]))
                continue
            last += 1
            db.execute("INSERT INTO topic_ids VALUES (?,?,?)", (topic, record.id, last))
            db.execute(
                "INSERT INTO topics (topic, seq, id, type, sender, traceparent, body, at) "
                "VALUES (?,?,?,?,?,?,?,?)",
                (topic, last, record.id, record.type, record.sender, record.traceparent, record.body, now),
            )
            numbers.append(last)
        db.execute(
            "INSERT INTO topic_heads VALUES (?,?) ON CONFLICT (topic) DO UPDATE SET seq=excluded.seq",
            (topic, last),
        )
        db.execute("DELETE FROM topics WHERE topic=? AND seq<=?", (topic, last - self._retain))
        db.execute("DELETE FROM topic_ids WHERE topic=? AND seq<=?", (topic, last - self._remember))
        return numbers
