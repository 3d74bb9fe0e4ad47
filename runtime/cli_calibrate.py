"""Commands about how a model's memory is kept: ``model calibrate`` and ``model profile``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from offbook.runtime.cli_machine import model_progress
from offbook.runtime.cli_output import console
from offbook.runtime.cli_team import AsJson

if TYPE_CHECKING:
    from offbook.runtime.kv.calibrate import Calibration
    from offbook.runtime.kv.profile import Profile
    from offbook.runtime.kv.scheme import KVScheme, LayerScheme

Reference = Annotated[str, typer.Argument(help="Such as wheel:smollm2-135m-instruct.")]

WINDOWS, QUICK_WINDOWS = 6, 2
"""Contexts that are read: a few tell schemes apart, since their predictions are compared token by token."""

model = typer.Typer(no_args_is_help=True)


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    app.add_typer(model, name="model")


@model.callback()
def options() -> None:
    """How the memory of a model's agents is kept: measure it, show it."""


@model.command()
def calibrate(
    reference: Reference,
    bytes_per_token: Annotated[
        float | None,
        typer.Option(help="At most so many bytes a token of a 4K context, hot tail included."),
    ] = None,
    target: Annotated[
        float | None, typer.Option(help="At most this share of 16-bit KV, such as 0.32.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer contexts, for a first look.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure ways to quantise a model's KV on text, and keep the best that fits as the model's profile.

    Engines use the profile from their next start, unless they are told another number of bits. Memory
    stored by another scheme is not lost, but read again from the agents' transcripts. Without a target the
    best one is kept that takes no more than the default.
    """
    from offbook.runtime.kv import profile

    profile.check_target(bytes_per_token, target)
    loaded = _load(reference)
    from offbook.runtime.kv import calibrate as calibration

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    errors = Console(stderr=True)
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("contexts", total=None)
        found = calibration.calibrate(
            loaded,
            per_token=bytes_per_token,
            ratio=target,
            windows=QUICK_WINDOWS if quick else WINDOWS,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    chosen = found.chosen
    kept = profile.Profile(
        model=loaded.fingerprint,
        ref=loaded.ref,
        scheme=chosen.scheme,
        bytes_per_token=chosen.bytes_per_token,
        perplexity_pct=chosen.perplexity_pct,
        divergence=chosen.divergence,
        scored=chosen.loss.tokens,
    )
    path = profile.save(kept)
    if as_json:
        typer.echo(msgspec.json.encode(_facts(found)).decode())
        return
    _show(reference, found)
    console.print(f"Kept in {path}", highlight=False, soft_wrap=True)


@model.command("profile")
def show_profile(
    reference: Reference,
    forget: Annotated[bool, typer.Option("--forget", help="Go back to the default scheme.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the scheme an engine keeps this model's KV by, or forget what calibration chose."""
    loaded = _load(reference)
    from offbook.runtime.kv import profile
    from offbook.runtime.kv.probe import derive

    if forget and profile.forget(loaded.fingerprint):
        console.print(f"The profile of {reference} is deleted.", highlight=False)
    found: Profile | None = profile.find(loaded.fingerprint)
    if as_json:
        typer.echo(msgspec.json.encode(found).decode())
    elif found is None:
        scheme = profile.default_scheme(derive(loaded.model), loaded.ref)
        console.print(f"{reference} has no profile: {_words(scheme)}", highlight=False)
    else:
        console.print(
            f"{reference}: {_words(found.scheme)}; {found.bytes_per_token:.0f} bytes a token, perplexity "
            f"{found.perplexity_pct:+.2f} % over {found.scored} tokens",
            highlight=False,
        )


def _load(reference: str) -> Any:
    """The model on the device an engine would use."""
    from offbook.runtime.models.blas import preload_blas

    preload_blas()  # before MLX
    import mlx.core as mx

    from offbook.runtime.models.load import load

    if not mx.is_available(mx.gpu):
        mx.set_default_device(mx.Device(mx.cpu))
    with model_progress(Console(stderr=True)) as report:
        return load(reference, progress=report)


def _show(reference: str, found: Calibration) -> None:
    table = Table(title=f"{reference}, contexts of 2K, last quarter scored", title_justify="left")
    windowed = any(one.scheme.window != one.scheme.full for one in found.measured)
    for column in ("tail", "full layers", "window layers") if windowed else ("tail", "layers"):
        table.add_column(column)
    table.add_column("K8 in layers")
    for column in ("ppl %", "mnat", "bytes/token", "of 16-bit"):
        table.add_column(column, justify="right")
    for one in sorted(found.measured, key=lambda one: one.divergence):
        style = "bold green" if one is found.chosen else "" if one.bytes_per_token <= found.target else "dim"
        table.add_row(
            str(one.scheme.tail),
            _layer(one.scheme.full),
            *([_layer(one.scheme.window)] if windowed else []),
            _list(one.scheme.sharp),
            f"{one.perplexity_pct:+.2f}",
            f"{one.divergence * 1e3:.2f}",
            f"{one.bytes_per_token:.0f}",
            f"{one.bytes_per_token / found.fp16_bytes_per_token:.3f}",
            style=style,
        )
    console.print(table)
    console.print(
        "ppl %: increase of the perplexity over 16-bit KV. mnat: how far predictions move from those with "
        "16-bit KV, in thousandths of a nat a token; the choice goes by it.",
        highlight=False,
    )
    console.print(
        f"Target: {found.target:.0f} bytes a token. Chosen: {_words(found.chosen.scheme)}", highlight=False
    )


def _facts(found: Calibration) -> dict[str, Any]:
    return {
        "target_bytes_per_token": found.target,
        "fp16_bytes_per_token": found.fp16_bytes_per_token,
        "measured": [
            {
                "scheme": one.scheme,
                "perplexity_pct": one.perplexity_pct,
                "divergence": one.divergence,
                "bytes_per_token": one.bytes_per_token,
                "chosen": one is found.chosen,
            }
            for one in found.measured
        ],
    }


def _layer(layer: LayerScheme) -> str:
    return f"K{layer.key_bits or 16} V{layer.value_bits or 16}/{layer.value_group}"


def _words(scheme: KVScheme) -> str:
    text = f"tail {scheme.tail}, {_layer(scheme.full)}"
    if scheme.window != scheme.full:
        text += f"; windows {_layer(scheme.window)}"
    return text + (f"; K8 in layers {_list(scheme.sharp)}" if scheme.sharp else "")


def _list(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices))
