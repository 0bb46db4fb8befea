"""The `splitpoint` command: its subcommands, and errors without tracebacks."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from splitpoint.errors import SplitpointError
from splitpoint.extras import missing_extra
from splitpoint_cli.output import EXIT_HELP, print_error

# The function of each command, or the application of its subcommands, in the order of the help.
COMMANDS = {
    "up": "splitpoint_cli.stack.up:up",
    "down": "splitpoint_cli.stack.down:down",
    "store": "splitpoint_cli.stack.store:store",
    "vllm-config": "splitpoint_cli.vllm_config:vllm_config",
    "generate": "splitpoint_cli.request.generate:generate",
    "chat": "splitpoint_cli.chat.command:chat",
    "batch": "splitpoint_cli.batch:batch",
    "plan": "splitpoint_cli.planning.plan:plan",
    "bottleneck": "splitpoint_cli.planning.bottleneck:bottleneck",
    "size": "splitpoint_cli.planning.size:size",
    "simulate": "splitpoint_cli.simulate.command:simulate",
    "status": "splitpoint_cli.request.status:status",
    "top": "splitpoint_cli.top.command:top",
    "doctor": "splitpoint_cli.doctor.command:doctor",
    "metrics": "splitpoint_cli.metrics:metrics",
    "probe": "splitpoint_cli.request.probe:probe",
    "certs": "splitpoint_cli.security.certs:certs",
    "token": "splitpoint_cli.security.token:token",
    "compose": "splitpoint_cli.compose:compose",
    "calibrate": "splitpoint_cli.calibrate:calibrate",
    "eval": "splitpoint_cli.eval.command:evaluate",
    "arena": "splitpoint_cli.arena.command:app",
    "bench": "splitpoint_cli.bench.commands:app",
}


class _Commands(Mapping[str, Any]):
    """The commands by name. Each is imported once it is asked for.

    Importing all of them takes longer than a short command runs.
    """

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = _load(name)
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


def _load(name: str) -> Any:
    """Import a command and return it as Typer runs it."""
    module, _, attribute = COMMANDS[name].partition(":")
    found = getattr(importlib.import_module(module), attribute)
    group = typer.Typer(add_completion=False)
    group.callback()(lambda: None)
    if isinstance(found, typer.Typer):
        group.add_typer(found, name=name)
    else:
        group.command(name)(found)
    commands: Any = typer.main.get_command(group)
    return commands.commands[name]


class _LazyGroup(TyperGroup):
    def __init__(self, **attributes: Any) -> None:
        super().__init__(**{**attributes, "commands": _Commands()})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        # Not by `get`: a KeyError of the import would mean that there is no such command.
        return self.commands[cmd_name] if cmd_name in COMMANDS else None


app = typer.Typer(
    cls=_LazyGroup,
    help="Serves language models whose KV cache lives in host memory.\n\n" + EXIT_HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
