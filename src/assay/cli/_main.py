"""The entry point: finds the command, and turns errors into one line and exit status 2."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from assay import __version__
from assay.cli import examine as _examine
from assay.cli import methods as _methods
from assay.cli import try_ as _try
from assay.core.errors import AssayError

app = typer.Typer(
    name="assay",
    help="Try this year's neural-network methods on your own model and data, and see what holds.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("examine")(_examine.examine)
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
        app()
    except AssayError as error:
        print(f"assay: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("assay: interrupted", file=sys.stderr)
        sys.exit(130)
