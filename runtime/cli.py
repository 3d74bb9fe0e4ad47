"""The command line: ``offbook``.

Owns the list of commands, how errors are shown (one line that says what was wrong, a traceback only with
``--debug``) and the exit codes: 0 done, 1 an error, 2 wrong usage. The commands are in ``cli_team`` (a
running team), ``cli_dead`` (messages that were given up), ``cli_machine`` (models, this machine, what is on
disk) and ``cli_calibrate`` (how a model's memory is kept). Imports neither MLX nor NumPy.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback

try:
    import typer
    from rich.console import Console
except ImportError as exc:  # pragma: no cover - the bare install has no command line
    raise SystemExit(f"the command line needs more packages ({exc}): pip install 'offbook[cpu]'") from exc

from offbook.bus.errors import OffbookError
from offbook.runtime import cli_calibrate, cli_dead, cli_machine, cli_team

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="A first try:  offbook doctor;  offbook run examples/village.py;  "
    "and in another terminal:  offbook ps;  offbook ask villager/ann 'What is new?'",
)

_debug = False


@app.callback()
def options(
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks and log what happens."),
) -> None:
    """Teams of language-model agents whose memory is their KV cache, in memory and on disk.

    A team is a Python script that starts a [bold]Runtime[/bold] by name. Its agents are addressed as
    [bold]kind/key[/bold], such as villager/ann.
    """
    global _debug
    _debug = debug
    logging.basicConfig(
        level=logging.INFO if debug else logging.ERROR, format="%(levelname)s %(name)s: %(message)s"
    )


cli_team.add_to(app)
cli_machine.add_to(app)
cli_calibrate.add_to(app)
cli_dead.add_to(app)


def main() -> None:
    """Run the command line and exit with its code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command; returns the exit code. Errors go to standard error, in one line each."""
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        app(arguments, prog_name="offbook")  # ends with SystemExit, wrong usage (2) included
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else 0 if exc.code is None else _said(errors, exc.code)
    except KeyboardInterrupt:
        return 130
    except OffbookError as exc:
        if _debug:
            raise
        return _said(errors, f"{exc.code}: {exc}")
    except OSError as exc:
        if _debug:
            raise
        return _said(errors, f"error: {exc}")
    except Exception as exc:
        if _debug:
            raise
        return _said(errors, f"{type(exc).__name__}: {exc}{_place(exc)}; 'offbook --debug ...' shows more")
    return 0


def _place(exc: BaseException) -> str:
    """Where in the script that runs the error comes from; empty if it is not the script's."""
    frames = traceback.extract_tb(exc.__traceback__)
    own = [frame for frame in frames if frame.filename in (sys.argv[0], os.path.abspath(sys.argv[0]))]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def _said(errors: Console, text: str) -> int:
    errors.print(text, markup=False, style="red")
    return 1


if __name__ == "__main__":
    main()
