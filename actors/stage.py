"""The stage: which actors are in memory.

Owns the cells. There is one per actor, however many messages come at once; a cell whose actor has nothing to
do rests, and leaves memory when it has rested for long or too many rest. While the messages that an earlier
process left for a kind are being read, its cells are held, so that what comes meanwhile does not go first.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING

import anyio
import anyio.abc

from .actor import ActorSpec
from .cell import Cell, CellPort
from .quiet import Quiet
from .records import Inbound

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Stage:
    """The cells of a host.

    Args:
        port: what cells need of the host.
        max_resting: resting actors kept in memory; the least recently used leave first.
        rest: real seconds after which a resting actor leaves.
    """

    def __init__(self, port: CellPort, quiet: Quiet, *, max_resting: int, rest: float) -> None:
        self._port = port
        self._quiet = quiet
        self._max_resting = max_resting
        self._rest = rest
        self._cells: dict[str, Cell] = {}
        self._resting: OrderedDict[str, Cell] = OrderedDict()
        self._held: set[str] = set()
        self._tasks: anyio.abc.TaskGroup | None = None

    def __iter__(self) -> Iterator[Cell]:
        return iter(list(self._cells.values()))

    def __len__(self) -> int:
        return len(self._cells)

    def start(self, tasks: anyio.abc.TaskGroup) -> None:
        """From now on cells run in this task group."""
        self._tasks = tasks
        tasks.start_soon(self._tidy)

    def find(self, actor: str) -> Cell | None:
        """The cell of an actor that is in memory."""
        return self._cells.get(actor)

    def cell(self, spec: ActorSpec, actor: str) -> Cell:
        """The cell of an actor, made if there is none."""
        cell = self._cells.get(actor)
        if cell is None:
            cell = self._cells[actor] = Cell(self._port, spec, actor)
            if spec.kind in self._held:
                cell.hold()
        return cell

    def hold(self, kind: str) -> None:
        """Begin nothing for the actors of a kind until ``release``."""
        self._held.add(kind)

    def release(self, spec: ActorSpec, rows: Iterable[Inbound]) -> None:
        """Let a kind's actors begin, each with the ``rows`` that the journal has for it."""
        waiting: dict[str, list[Inbound]] = {}
        for row in rows:
            waiting.setdefault(row.actor, []).append(row)
        cells = [self.cell(spec, actor) for actor in waiting]
        self._held.discard(spec.kind)
        cells += [cell for cell in self if cell.spec is spec and cell.id not in waiting]
        for cell in cells:
            if cell.state == "held":
                cell.release(waiting.get(cell.id, ()))

    def withdraw(self, kind: str) -> None:
        """The rows could not be read: what came meanwhile waits in the journal with the others."""
        self._held.discard(kind)
        for cell in self:
            if cell.spec.kind == kind and cell.state == "held":
                self.drop(cell.id)
                cell.mailbox.wake()  # whoever waits for it need not: nobody is in memory

    def drop(self, actor: str) -> None:
        """Forget a stopped actor's cell, so that the next message makes a new one."""
        self._cells.pop(actor, None)
        self._resting.pop(actor, None)

    def started(self, cell: Cell) -> None:
        """A cell has something to do."""
        assert self._tasks is not None
        self._resting.pop(cell.id, None)
        self._quiet.take()
        self._tasks.start_soon(cell.run)

    def rested(self, cell: Cell) -> None:
        """A cell has nothing to do."""
        if cell.asleep:
            if self._cells.get(cell.id) is cell:
                del self._cells[cell.id]
        elif not cell.stopped and self._tasks is not None and not self._tasks.cancel_scope.cancel_called:
            self._resting[cell.id] = cell
            self._resting.move_to_end(cell.id)
            while len(self._resting) > self._max_resting:
                self._passivate(next(iter(self._resting)))
        self._quiet.give()

    def _passivate(self, actor: str) -> None:
        assert self._tasks is not None
        cell = self._resting.pop(actor)
        cell.state = "running"
        self._quiet.take()
        self._tasks.start_soon(cell.passivate)

    async def _tidy(self) -> None:
        """Let actors leave memory that have rested for long."""
        while True:
            await anyio.sleep(self._rest / 4)
            before = time.monotonic() - self._rest
            while self._resting:
                actor, cell = next(iter(self._resting.items()))
                if cell.rested_at > before:
                    break
                self._passivate(actor)
