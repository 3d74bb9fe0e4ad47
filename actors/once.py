"""``once=``: what a script does once, however often it is started.

Owns the names. Each has a message id of its own, so that a repetition before the name was noted is known by
the receiver, and a row in the journal after that.
"""

from __future__ import annotations

from . import statements
from .journal import Journal
from .message import derive_id


class Once:
    """One named act, or an unnamed one (``name=None``), which is never remembered."""

    def __init__(self, journal: Journal, verb: str, name: str | None) -> None:
        self._journal = journal
        self._key = None if name is None else f"{verb}:{name}"
        self.id = None if self._key is None else derive_id("once", self._key)

    async def seen(self) -> tuple[bytes | None] | None:
        """What was noted when it was done, in a tuple; None if it was not."""
        key = self._key
        if key is None:
            return None
        return await self._journal.do("once", lambda db: statements.get_once(db, key))

    async def note(self, value: bytes | None = None) -> None:
        """It has been done."""
        key = self._key
        if key is not None:
            await self._journal.do("once", lambda db: statements.put_once(db, key, value))
