"""What happens between two steps of something else: no order, message or answer is lost by it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio

from offbook.actors import Actor, Message, on
from offbook.actors.host import Host
from offbook.actors.testing import stored_state, team

NEWS = "news"


class News(Message):
    number: int


class Reader(Actor):
    topics = (NEWS,)
    news: list[int] = []

    @on
    async def read(self, msg: News) -> None:
        self.news.append(msg.number)


def after(host: Host, name: str, act: Callable[[], Awaitable[Any]]) -> None:
    """Do something right after the journal's next work of this name, before its result is used."""
    do = host.journal.do

    async def doing(what: str, work: Callable[[Any], Any], **how: Any) -> Any:
        result = await do(what, work, **how)
        if what == name:
            host.journal.do = do  # type: ignore[method-assign]
            await act()
        return result

    host.journal.do = doing  # type: ignore[method-assign, assignment]


async def test_an_event_published_while_its_topic_is_first_followed_keeps_nothing_busy(
    tmp_path: Path,
) -> None:
    async with team(tmp_path, engine=False) as (host, _):
        after(host, "cursor", lambda: host.publish(NEWS, News(0)))
        await host.register(Reader)
        with anyio.fail_after(10):
            await host.idle()
        await host.spawn(Reader, "r")
        await host.publish(NEWS, News(1))
        await host.idle()
        assert (await stored_state(host, "reader/r"))["news"] == [1]
