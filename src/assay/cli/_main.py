"""The entry point: finds the command, and turns errors into one line and exit status 2."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from assay import __version__
from assay.cli import compress as _compress
from assay.cli import examine as _examine
from assay.cli import methods as _methods
from assay.cli import try_ as _try
from assay.core.errors import AssayError

# Typer carries a click of its own and shows only this leaf of its usage errors.
_USAGE_ERROR: Any = typer.BadParameter.__base__
_INTERRUPTED = 130

app = typer.Typer(
    name="assay",
    help="Try this year's neural-network methods on your own model and data, and see what holds.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("examine")(_examine.examine)
app.command("compress")(_compress.compress)
app.command("methods")(_methods.methods)
app.command("try")(_try.try_method)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"assay {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    # Nothing that assay does may reach for a model hub.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def main() -> None:
    """Run the command line."""
    try:
        status = app(prog_name="assay", standalone_mode=False) or 0
    except AssayError as error:
        _complain(str(error))
        status = 2
    except _USAGE_ERROR as error:
        if len(sys.argv) == 1:
            error.show()  # the help
        else:
            command = error.ctx.command_path if error.ctx else "assay"
            _complain(f"{error.format_message().rstrip('.')}: see `{command} --help`")
        status = 2
    if status == _INTERRUPTED:
        _complain("interrupted")
    sys.exit(status)


def _complain(message: str) -> None:
    print(f"assay: {' '.join(message.split())}", file=sys.stderr)
