"""Commands about messages that were given up: ``dead ls``, ``dead resend``, ``dead drop``.

A running team is asked over the bus; the journal of one that is down is opened here.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, TypeVar

import anyio
import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from offbook.actors import deadletters
from offbook.actors.control import DeadInfo, DeadPage, DeadResult, DropDead, ListDead, ResendDead
from offbook.actors.journal import Journal
from offbook.bus import connect
from offbook.bus.errors import InvalidRequest
from offbook.bus.security import home
from offbook.runtime.cli_output import console
from offbook.runtime.cli_team import AsJson, RuntimeName, chosen_runtime, known_runtimes

T = TypeVar("T")

Numbers = Annotated[list[int] | None, typer.Argument(help="Which, by their numbers in 'dead ls'.")]
To = Annotated[
    str | None, typer.Option("--to", help="Only what was for addresses that start so, such as villager/.")
]
All = Annotated[bool, typer.Option("--all", help="Every one.")]

dead = typer.Typer(no_args_is_help=True)


@dead.callback()
def dead_options() -> None:
    """Dead letters: messages that were given up. Look at them, send them again, drop them.

    A message becomes one when its handler failed on every try, or when nobody takes it. Its effects were
    rolled back each time, so once the cause is mended it can be sent again.
    """


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    app.add_typer(dead, name="dead")


@dead.command("ls")
def dead_ls(
    to: To = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="At most so many.")] = 100,
    after: Annotated[int, typer.Option(help="Only those with higher numbers.")] = 0,
    runtime: RuntimeName = None,
    as_json: AsJson = False,
) -> None:
    """List dead letters, the oldest first: whose they were, what they said, why they were given up."""
    request = ListDead(after=after, to=to or "", limit=limit)
    page = _do(runtime, request, DeadPage, lambda journal: _page(journal, request))
    if as_json:
        typer.echo(msgspec.json.encode(page).decode())
        return
    if page.letters:
        console.print(_table(page.letters))
    further = f"; further ones with --after {page.letters[-1].number}" if page.more else ""
    console.print(f"{len(page.letters)} shown of {page.total} dead letters{further}", highlight=False)


@dead.command("resend")
def dead_resend(
    numbers: Numbers = None, to: To = None, every: All = False, runtime: RuntimeName = None
) -> None:
    """Send dead letters again: each as a new message, tried anew. It is a dead letter no more.

    If the team is down, they are sent when it is started. Ends with code 1 if one cannot be sent.
    """
    request = ResendDead(numbers=tuple(numbers or ()), to=_chosen(numbers, to, every))
    _report(_do(runtime, request, DeadResult, lambda journal: _resend(journal, request)), "sent again")


@dead.command("drop")
def dead_drop(
    numbers: Numbers = None, to: To = None, every: All = False, runtime: RuntimeName = None
) -> None:
    """Delete dead letters for good. Ends with code 1 if there is none of a number."""
    request = DropDead(numbers=tuple(numbers or ()), to=_chosen(numbers, to, every))
    _report(_do(runtime, request, DeadResult, lambda journal: _drop(journal, request)), "dropped")


def _chosen(numbers: list[int] | None, to: str | None, every: bool) -> str | None:
    """The prefix of the addresses that are meant; None for the numbers alone."""
    if sum((bool(numbers), to is not None, every)) != 1:
        raise InvalidRequest(
            "say which dead letters: their numbers (see 'offbook dead ls'), --to PREFIX, or --all"
        )
    return "" if every else to


def _report(result: DeadResult, what: str) -> None:
    console.print(f"{len(result.done)} dead letters {what}", highlight=False)
    for number, why in result.refused.items():
        console.print(f"[red]{number}[/red]: ", Text(why), highlight=False, soft_wrap=True)
    if result.refused:
        raise typer.Exit(1)


def _table(letters: tuple[DeadInfo, ...]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("number", "given up", "for", "from", "type", "tries", "body", "reason"):
        right = column in ("number", "tries")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for one in letters:
        at = time.strftime("%m-%d %H:%M:%S", time.localtime(one.at))
        cells = (str(one.number), at, one.to, one.sender, one.type, str(one.tries), one.body, one.reason)
        table.add_row(*(Text(cell) for cell in cells))  # as they are: they may hold brackets
    return table


def _do(
    runtime: str | None,
    request: ListDead | ResendDead | DropDead,
    returns: type[T],
    offline: Callable[[Journal], Awaitable[T]],
) -> T:
    """Ask the team, or do it on the journal of one that is down."""
    name = chosen_runtime(runtime, running=None)

    async def online() -> T:
        async with connect(name) as bus:
            reply: T = await bus.ask(f"host/{name}", request, timeout=60, returns=returns)
            return reply

    async def beside() -> T:
        journal = await Journal.open(home() / name / "journal.sqlite")
        try:
            return await offline(journal)
        finally:
            await journal.close()

    return anyio.run(beside if known_runtimes()[name] is None else online)


async def _page(journal: Journal, request: ListDead) -> DeadPage:
    return await journal.do("dead", partial(deadletters.page, request=request))


async def _resend(journal: Journal, request: ResendDead) -> DeadResult:
    numbers = await journal.do("dead", partial(deadletters.chosen, request=request))
    sent = await journal.do("resend", lambda db: deadletters.resend(db, numbers, time.time()))
    return sent.result


async def _drop(journal: Journal, request: DropDead) -> DeadResult:
    numbers = await journal.do("dead", partial(deadletters.chosen, request=request))
    return await journal.do("drop", lambda db: deadletters.drop(db, numbers))
