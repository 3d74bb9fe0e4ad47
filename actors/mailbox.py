"""A mailbox: the messages that wait for one actor, in the journal's order, and who waits for their answers.

Owns that order, that a message is in it once, and the askers: a question may be asked again, under the same
id, while it waits or is being handled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import anyio

from .records import Inbound

if TYPE_CHECKING:
    from offbook.bus.delivery import Delivery


class Mailbox:
    """Stored messages, the one being handled first.

    Attributes:
        room: set when a message leaves; another event takes its place.
        ending: the place in the journal (``seq``) of a question that is being dropped: nobody joins it.
    """

    def __init__(self) -> None:
        self.room = anyio.Event()
        self.ending = -1
        self._messages: deque[Inbound] = deque()
        self._seqs: set[int] = set()
        self._askers: dict[int, list[Delivery]] = {}  # by the message's place: ids may come again
        self._begun = False  # the first one is being handled

    def __len__(self) -> int:
        return len(self._messages)

    def __iter__(self) -> Iterator[Inbound]:
        return iter(list(self._messages))

    def __getitem__(self, place: int) -> Inbound:
        return self._messages[place]

    def put(self, message: Inbound, asker: Delivery | None = None) -> bool:
        """Add a message; False if it is here already.

        Who stored them may come here in another order than the journal's, which is the one that counts.
        """
        if asker is not None:
            self._askers.setdefault(message.seq, []).append(asker)
        if message.seq in self._seqs:
            return False
        self._seqs.add(message.seq)
        place = len(self._messages)
        while place > self._begun and self._messages[place - 1].seq > message.seq:
            place -= 1
        self._messages.insert(place, message)
        return True

    def begin(self) -> Inbound:
        """The first message, which is being handled from now on: none goes before it."""
        self._begun = True
        return self._messages[0]

    def leave(self, message: Inbound) -> None:
        """The message has been dealt with."""
        if self._messages and self._messages[0] is message:
            self._messages.popleft()
            self._begun = False
        self._seqs.discard(message.seq)
        self._askers.pop(message.seq, None)
        self.wake()

    def wake(self) -> None:
        """Let whoever waits for room look again."""
        self.room.set()
        self.room = anyio.Event()

    # -- askers -------------------------------------------------------------------------------------------

    def join(self, message_id: str, asker: Delivery) -> bool:
        """Let one more asker wait for a message, as long as it may; False if it is not here."""
        for message in self._messages:
            if message.id == message_id and message.seq != self.ending:
                self._askers.setdefault(message.seq, []).append(asker)
                deadline = asker.envelope.deadline
                message.deadline = max(message.deadline, deadline) if message.deadline and deadline else 0.0
                return True
        return False

    def askers(self, message: Inbound) -> list[Delivery]:
        """Who waits for the answer to a message."""
        return self._askers.get(message.seq, [])

    def release_askers(self, messages: Iterable[Inbound]) -> list[Delivery]:
        """Who waited for the answers to messages, and is to be told something else."""
        return [asker for message in messages for asker in self._askers.pop(message.seq, [])]
