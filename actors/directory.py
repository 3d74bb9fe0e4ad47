"""The directory: which kinds of addresses there are, and whether another may yet come.

Owns the check of a receiver before its message is stored. A kind is known if it is registered here, if
a connected peer serves it now or has ever been seen to, if the journal has actors of it (their class will be
registered), or if the host was told that another process serves it (``peers``). A message to a known kind
is taken and waits for its receiver (``outbox.py``). Any other is refused at once if the kind is a likely slip
of a known one, or if the script is done with setting up (it runs): nothing here will serve it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from typing import TYPE_CHECKING

from offbook.bus.address import check_kind
from offbook.bus.errors import NoSuchActor, OffbookError
from offbook.bus.statistics import BrokerStatistics
from offbook.bus.suggest import closest, hint

from . import statements
from .journal import Journal

if TYPE_CHECKING:
    from offbook.bus.client import Bus

_BROKER = "broker/main"
_LOOK = 5.0
"""Seconds to wait for the broker's list of kinds; without one nothing is refused."""


class Directory:
    """The kinds that messages can go to.

    Args:
        registered: the kinds of this host, now.
        peers: kinds that other processes serve, or will serve.

    Attributes:
        complete: the script has registered what it has.
    """

    def __init__(
        self, bus: Bus, journal: Journal, registered: Callable[[], Collection[str]], peers: Collection[str]
    ) -> None:
        self._bus = bus
        self._journal = journal
        self._registered = registered
        self._known = {check_kind(peer) for peer in peers}
        self.complete = False

    async def check(self, address: str) -> None:
        """Refuse an address that nobody will ever serve.

        Raises:
            NoSuchActor: its kind is not known; names the known ones, and the one that was probably meant.
        """
        kind = address.partition("/")[0]
        if kind in self._registered() or kind in self._known:
            return
        if await self._journal.do("kind", lambda db: statements.knows_kind(db, kind)):
            self._known.add(kind)
            return
        served: tuple[str, ...] = ()
        try:
            look = {"type": "Kinds"}
            served = (await self._bus.ask(_BROKER, look, timeout=_LOOK, returns=BrokerStatistics)).kinds
        except OffbookError:
            return  # The broker is away for now: the message will wait for it, too.
        if kind in served:
            self._known.add(kind)
            with suppress(OffbookError):  # also after a restart, when its process may come later than ours
                await self._journal.do("kind", lambda db: statements.note_kind(db, kind))
            return
        known = tuple(sorted({*self._registered(), *self._known, *served}))
        if self.complete or closest(kind, known) is not None:
            raise NoSuchActor(
                f"nobody serves {address!r}: {hint(kind, known)}. If another process is to serve it later, "
                f"say so: peers=[{kind!r}]",
                address=address,
                kinds=list(known),
            )
