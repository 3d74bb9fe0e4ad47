"""Commands that talk to a team: ``run``, ``ps``, ``ask``, ``memory``."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import anyio
import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from offbook.actors.control import ActorInfo, ActorPage, HostInfo, HostStatus, ListActors
from offbook.actors.lm import ENGINE_ADDRESS, AgentStats, EngineStats, SetMemory, Stats
from offbook.bus import Bus, connect, parse_address
from offbook.bus.address import check_name
from offbook.bus.errors import InvalidRequest, NoSuchActor, OffbookError
from offbook.bus.security import home
from offbook.runtime.child import LONGEST_PAUSE_S
from offbook.runtime.cli_output import console
from offbook.runtime.config import InvalidConfig, format_bytes, parse_memory
from offbook.runtime.describe import Describe, Kind, text_message
from offbook.runtime.lockfile import LockFile
from offbook.runtime.waiting import ask_engine


def runtime_option(help_text: str) -> Any:
    """The option that names a team."""
    return typer.Option("--runtime", "-r", envvar="OFFBOOK_RUNTIME", help=help_text)


RuntimeName = Annotated[str | None, runtime_option("Which team; not needed if one is running.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(run)
    app.command()(ps)
    app.command()(ask)
    app.command(context_settings={"ignore_unknown_options": True})(memory)  # -5GiB is a size, a wrong one


def known_runtimes() -> dict[str, int | None]:
    """Every runtime of this user by name, with the process of those that run."""
    found: dict[str, int | None] = {}
    for lock in sorted(home().glob("*/runtime.lock")):
        file = LockFile(lock)
        found[lock.parent.name] = file.holder() if file.held() else None
    return found


def chosen_runtime(name: str | None, *, running: bool | None = True) -> str:
    """The runtime that is meant: the one named, else the only one that runs, else the only one there is.

    Args:
        running: True if it must run, None if it may, False if it must not; then the one that runs is not
            preferred, nor one of several that do not: what is done to it is better asked for by name.

    Raises:
        NoSuchActor: there is none, or it is not running though it should be.
        InvalidRequest: there are several, or it is running though it should not be.
    """
    runtimes = known_runtimes()
    if name is None:
        up = [known for known, pid in runtimes.items() if pid is not None]
        candidates = up if running or (running is None and len(up) == 1) else list(runtimes)
        if not candidates:
            raise NoSuchActor("no runtime is running: start one, e.g. 'offbook run examples/village.py'")
        if len(candidates) > 1:
            raise InvalidRequest(f"there are several runtimes, choose one with -r: {', '.join(candidates)}")
        name = candidates[0]
    check_name(name, "runtime name")
    if name not in runtimes:
        there = f"; there are: {', '.join(runtimes)}" if runtimes else ""
        raise NoSuchActor(f"there is no runtime {name!r} in {home()}{there}")
    if running and runtimes[name] is None:
        raise NoSuchActor(f"runtime {name!r} is not running: start its script, e.g. 'offbook run FILE'")
    if running is False and runtimes[name] is not None:
        raise InvalidRequest(f"runtime {name!r} is running, in process {runtimes[name]}: end it first")
    return name


def run(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="A Python file with 'async def main()', or a plain script.")],
) -> None:
    """Run a team's script: its [bold]async def main()[/bold], or the whole file as a program.

    A main() that is not async is the program's own to call.

    What follows FILE are the script's own arguments. Started again after any kind of end, the same script
    goes on where it was.
    """
    if not file.is_file():
        raise InvalidRequest(f"there is no file {str(file)!r}")
    if file.suffix != ".py":
        raise InvalidRequest(f"{str(file)!r} is not a Python file (.py)")
    sys.argv = [str(file), *context.args]
    sys.path[:0] = [str(file.resolve().parent), str(Path.cwd())]
    if not _has_async_main(file):
        runpy.run_path(str(file), run_name="__main__")
        return
    # Under its own name, not as __main__: what it defines is found by importing it, too.
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise InvalidRequest(f"{str(file)!r} cannot be loaded as a module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    anyio.run(module.main)


def _has_async_main(file: Path) -> bool:
    """Whether a file has ``async def main`` and leaves calling it to us.

    A file that runs it itself, under ``if __name__ == "__main__"`` or as a statement like
    ``anyio.run(main)``, is a program. One whose ``main`` is not async and is called by nobody would do
    nothing: ``InvalidRequest``.
    """
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except SyntaxError as exc:
        raise InvalidRequest(f"{file}, line {exc.lineno}: {exc.msg}") from exc
    program = any(
        (isinstance(node, ast.If) and "__name__" in _names(node.test))
        or (
            "main" in _names(node)
            and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        )
        for node in tree.body
    )
    found = any(isinstance(node, ast.AsyncFunctionDef) and node.name == "main" for node in tree.body)
    if not found and not program and "main" not in _names(tree):
        for node in tree.body:
            # A decorator may hand it to what runs it.
            if isinstance(node, ast.FunctionDef) and node.name == "main" and not node.decorator_list:
                raise InvalidRequest(
                    f"{file}, line {node.lineno}: main() is not async and nothing calls it, so there is "
                    "nothing to run: make it 'async def main()', or call it at the end of the file"
                )
    return found and not program


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def ps(runtime: RuntimeName = None, as_json: AsJson = False) -> None:
    """Show a team: its actors, where their memory is, tokens, waiting messages.

    Memory is [red]hot[/red] (in the engine's memory), [yellow]warm[/yellow] (on disk, one read away) or
    [blue]cold[/blue] (tokens only: read again when needed).
    """
    runtimes = known_runtimes()
    if runtime is None and not any(runtimes.values()) and runtimes and not as_json:
        console.print("no runtime is running. Known here: " + ", ".join(runtimes), highlight=False)
        return
    name = chosen_runtime(runtime)
    host, actors, engine = anyio.run(_look, name)
    if as_json:
        facts = {"host": host, "actors": actors, "engine": engine}
        typer.echo(msgspec.json.encode(facts).decode())
        return
    busy = f"{host.busy} things in progress" if host.busy else "idle"
    console.print(
        f"[bold]{name}[/bold]: process {host.pid}, {host.actors} actors, {host.active} in memory, {busy}; "
        f"{host.turns} turns, {host.failed} failed, {host.dead_letters} dead letters",
        highlight=False,
        soft_wrap=True,
    )
    if engine is None:
        console.print("engine: not there (loading, restarting, or none was started)", highlight=False)
    else:
        console.print(
            f"engine: {engine.model} on {engine.device}, process {engine.pid}; "
            f"{format_bytes(engine.used_bytes)} of {format_bytes(engine.budget_bytes)} used, "
            f"{format_bytes(engine.disk_bytes)} on disk",
            highlight=False,
            soft_wrap=True,
        )
    console.print(_actor_table(actors, engine))
    if host.dead_letters:
        console.print("'offbook dead ls' shows the dead letters", highlight=False)
    for actor in actors:
        if actor.error:
            console.print(
                f"[red]{actor.id}[/red] was stopped: {actor.error}", highlight=False, soft_wrap=True
            )
    for failure in host.failures[-3:]:
        console.print(
            f"[red]{failure.actor}[/red] {failure.type}: {failure.error}", highlight=False, soft_wrap=True
        )


async def _look(name: str) -> tuple[HostInfo, list[ActorInfo], EngineStats | None]:
    async with connect(name) as bus:
        host: HostInfo = await bus.ask(f"host/{name}", HostStatus(), timeout=10, returns=HostInfo)
        actors: list[ActorInfo] = []
        more = True
        while more and len(actors) < 10_000:
            after = actors[-1].id if actors else ""
            request = ListActors(after=after)
            page: ActorPage = await bus.ask(f"host/{name}", request, timeout=10, returns=ActorPage)
            actors += page.actors
            more = page.more
        engine: EngineStats | None = None
        with contextlib.suppress(OffbookError):  # shown as "not there"
            engine = await bus.ask(ENGINE_ADDRESS, Stats(), timeout=10, returns=EngineStats)
    return host, actors, engine


_COLOURS = {"hot": "red", "warm": "yellow", "cold": "blue"}


def _actor_table(actors: list[ActorInfo], engine: EngineStats | None) -> Table:
    memories: dict[str, AgentStats] = {agent.agent: agent for agent in engine.agents} if engine else {}
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("actor", "state", "waiting", "turns", "memory", "tokens", "in memory", "on disk"):
        left = name in ("actor", "state", "memory")
        table.add_column(name, justify="left" if left else "right", no_wrap=True, overflow="fold")
    for actor in actors:
        memory = memories.get(actor.id)
        # Without an engine nobody knows where memory is.
        where = memory.where if memory else "cold" if actor.tokens and engine else ""
        table.add_row(
            actor.id,
            f"[red]{actor.state}[/]" if actor.error else actor.state,
            str(actor.mailbox),
            str(actor.turns),
            f"[{_COLOURS[where]}]{where}[/]" if where else "",
            str(actor.tokens) if actor.tokens else "",
            format_bytes(memory.resident_bytes) if memory and memory.resident_bytes else "",
            format_bytes(memory.disk_bytes) if memory and memory.disk_bytes else "",
        )
    return table


def ask(
    address: Annotated[str, typer.Argument(help="Whom: kind/key, such as villager/ann.")],
    text: Annotated[str, typer.Argument(help='What: a text, or a whole message as {"type": ...}.')],
    type_: Annotated[
        str | None, typer.Option("--type", "-t", help="The message type, if several take a text.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the answer.")] = 120.0,
    runtime: RuntimeName = None,
) -> None:
    """Ask an actor and print its answer as it comes.

    The text goes into the request of the actor that holds a single text, such as Ask(question).
    """
    parse_address(address)
    if not text.strip():
        raise InvalidRequest("the text is empty: there is nothing to ask")
    anyio.run(_ask, chosen_runtime(runtime), address, text, type_, timeout)


async def _ask(name: str, address: str, text: str, type_: str | None, timeout: float) -> None:
    async with connect(name) as bus:
        body = await _message(bus, name, address, text, type_)
        shown = ""
        try:
            async with bus.stream(address, body, timeout=timeout) as reply:
                async for piece in reply:
                    if isinstance(piece, str):
                        shown += piece
                        typer.echo(piece, nl=False)
        finally:
            if shown:  # also where the answer breaks off: an error has a line of its own
                typer.echo()
        if reply.result is not None and reply.result != shown:
            result = reply.result
            typer.echo(result if isinstance(result, str) else json.dumps(result, default=repr))


async def _message(bus: Bus, name: str, address: str, text: str, type_: str | None) -> dict[str, Any]:
    if text.lstrip().startswith("{"):
        try:
            body = json.loads(text)
        except ValueError as exc:
            raise InvalidRequest(f"the message is not JSON: {exc}") from exc
        if not isinstance(body.get("type", type_), str):
            raise InvalidRequest('a message as JSON needs a "type", or give --type')
        return {"type": type_, **body}
    request = Describe(kind=parse_address(address).kind)
    kind: Kind = await bus.ask(f"runtime/{name}", request, timeout=10, returns=Kind)
    return text_message(kind.messages, text, type_)


def memory(
    size: Annotated[str | None, typer.Argument(help="The new budget, such as 4GiB; none shows it.")] = None,
    runtime: RuntimeName = None,
) -> None:
    """Show the engine's memory budget, or change it while the team runs.

    The budget covers weights, agents' memory and workspace. Any change, a larger one too, waits for the
    turns that run and moves all agents' memory to disk first; the agents stay, and each one's memory is
    restored at its next turn. "Most used" starts over.
    """
    if size is not None and size.startswith("-") and not size[1:2].isdigit():
        raise typer.BadParameter(f"there is no option {size}")
    budget = None if size is None else parse_memory(size)
    try:
        stats = anyio.run(_memory, chosen_runtime(runtime), budget)
    except InvalidConfig as exc:
        # Python's callers may leave it to the engine with None; here there is no such value.
        raise InvalidConfig(str(exc).replace(", or None for what can be spared", "")) from exc
    table = Table(show_header=False, box=None)
    for label, value in (
        ("budget", stats.budget_bytes),
        ("used", stats.used_bytes),
        ("most used", stats.peak_bytes),
        ("weights", stats.weights_bytes),
        ("agents' memory", stats.pool_bytes),
        ("of that in use", stats.pool_used_bytes),
        ("on disk", stats.disk_bytes),
    ):
        table.add_row(label, format_bytes(value))
    console.print(table)


async def _memory(name: str, budget: int | None) -> EngineStats:
    async with connect(name) as bus:
        request = Stats() if budget is None else SetMemory(budget_bytes=budget)
        return await ask_engine(bus, request, expected=_engine_expected(name))


def _engine_expected(name: str) -> Callable[[], bool]:
    """Whether a team has an engine process, serving or not; between two of them there are some seconds."""
    lock = LockFile(home() / name / "engine.lock")
    held_at = time.monotonic() if lock.path.exists() else float("-inf")

    def expected() -> bool:
        nonlocal held_at
        if lock.held():
            held_at = time.monotonic()
        return time.monotonic() - held_at < LONGEST_PAUSE_S + 1

    return expected
