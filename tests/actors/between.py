"""Help for tests of what happens between two steps of something else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal

from offbook.actors.host import Host
from offbook.actors.journal import JournalFailed

When = Literal["before", "given", "after", "failing"]


def beside(host: Host, name: str, when: When, act: Callable[[], Awaitable[Any]]) -> None:
    """Do something beside the journal's next work of this name.

    Args:
        when: before the journal gets the work; once it was ``given`` it, before its result is used; after the
            result has come; or then, and the work is said to have failed (``failing``).
    """
    do = host.journal.do

    async def doing(what: str, work: Callable[[Any], Any], **how: Any) -> Any:
        if what != name:
            return await do(what, work, **how)
        host.journal.do = do  # type: ignore[method-assign]
        if when == "before":
            await act()
        result = host.journal.submit(what, work, **how)
        if when == "given":
            await act()
        value = await result
        if when in ("after", "failing"):
            await act()
        if when == "failing":
            raise JournalFailed("the disk is gone")
        return value

    host.journal.do = doing  # type: ignore[method-assign, assignment]
