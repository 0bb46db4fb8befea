"""The `splitpoint` command: its subcommands, and errors without tracebacks."""

from __future__ import annotations

import gc
import sys
from typing import Annotated

import typer

from splitpoint.errors import SplitpointError
from splitpoint.extras import missing_extra
from splitpoint_cli import metrics
from splitpoint_cli.arena import command as arena
from splitpoint_cli.batch import command as batch
from splitpoint_cli.bench import commands as bench
from splitpoint_cli.calibrate import command as calibrate
from splitpoint_cli.chat import command as chat
from splitpoint_cli.compose import command as compose
from splitpoint_cli.doctor import command as doctor
from splitpoint_cli.eval import command as evaluation
from splitpoint_cli.output import EXIT_HELP, print_error
from splitpoint_cli.planning import plan, size, what_pays
from splitpoint_cli.request import generate, probe, status
from splitpoint_cli.security import certs, token
from splitpoint_cli.simulate.command import simulate
from splitpoint_cli.stack import down, up
from splitpoint_cli.top.command import top
from splitpoint_cli.trace import command as trace

app = typer.Typer(
    help="Serves language models whose KV cache lives in host memory.\n\n" + EXIT_HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(up.up)
app.command()(down.down)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(batch.batch)
app.command()(plan.plan)
app.command()(what_pays.what_pays)
app.command()(size.size)
app.command()(simulate)
app.command()(status.status)
app.command()(top)
app.command()(doctor.doctor)
app.command()(metrics.metrics)
app.command()(trace.trace)
app.command()(probe.probe)
app.command()(certs.certs)
app.command()(token.token)
app.command()(compose.compose)
app.command()(calibrate.calibrate)
app.command("eval")(evaluation.evaluate)
app.add_typer(arena.app, name="arena")
app.add_typer(bench.app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"splitpoint {version()}")
        raise typer.Exit


def version() -> str:
    """Return the installed version; "unknown" if the packages run from a bare source tree."""
    from importlib import metadata  # slow to load, and rarely needed

    try:
        return metadata.version("splitpoint")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"


@app.callback()
def options(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    # The docstring of the callback would replace the app's help.
    del show_version


def main() -> None:
    """Run the command line; a SplitpointError ends in one line and its exit code.

    So does a module that comes with an extra which is not installed.
    """
    try:
        app()
    except SplitpointError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        if (missing := missing_extra(error)) is None:
            raise
        print_error(missing)
        sys.exit(missing.exit_code)
    finally:
        # Python ends with a collection over all modules: a sixth of a short command. Triton, which
        # may come with torch, would take what is not collected for leaks, and list it.
        if "torch" not in sys.modules:
            gc.freeze()


if __name__ == "__main__":
    main()
