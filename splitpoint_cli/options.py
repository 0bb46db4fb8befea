"""Options of commands: a dataclass names the declared options, and Typer gets a signature of them.

    @dataclass(frozen=True, slots=True)
    class Options:
        chunk_tokens: int = of(store.CHUNK_TOKENS, "Arena")

    @takes_options
    def command(options: Options) -> None: ...

The options by which commands reach a scheduler and prove their identity are declared here, too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import field, fields, is_dataclass
from inspect import Parameter, Signature
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

import typer

from splitpoint.options.option import Option

T = TypeVar("T")


def of(option: Option[T], panel: str | None = None) -> T:
    """Declare a field as the value of an option; `panel` is its group in `--help`."""
    metadata = {"option": option, "panel": panel}
    declared: Any = (
        field(metadata=metadata)
        if option.is_required
        else field(default=option.default, metadata=metadata)
    )
    value: T = declared
    return value


def declared_options(kind: Any) -> Iterator[tuple[str, Option[Any]]]:
    """Yield name and option of each field that a dataclass, or an object of one, declares."""
    for each in fields(kind):
        if "option" in each.metadata:
            yield each.name, each.metadata["option"]


def check_options(values: Any) -> None:
    """Check every declared option of a dataclass object. Raises InvalidArgument."""
    for name, option in declared_options(values):
        option.check(getattr(values, name))


def arguments_of(options: Iterable[Option[object]], values: Any) -> list[str]:
    """Return the command line that gives a service these options with an object's values.

    Options that are None or have their default are left out.
    """
    words: list[str] = []
    for option in options:
        value = getattr(values, option.field)
        if value is not None and value != option.default:
            words += [option.flag] if option.kind is bool else [option.flag, str(value)]
    return words


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for Typer with the options of one parameter, a dataclass, as its own.

    They take the place of that parameter; the others are Typer's as usual.
    """
    taken = list(inspect.signature(command, eval_str=True).parameters.values())
    [(place, options)] = [
        (place, each) for place, each in enumerate(taken) if is_dataclass(each.annotation)
    ]
    kind: Any = options.annotation
    own = list(_parameters(kind))
    names = [each.name for each in own]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        values = {name: given.pop(name) for name in names}
        command(**{options.name: kind(**values)}, **given)

    taken[place : place + 1] = own
    parameters = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in taken]
    run.__dict__["__signature__"] = Signature(parameters)
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _parameters(kind: Any) -> Iterator[Parameter]:
    """Yield the parameter of each field that declares an option, or has one of Typer's as type."""
    hints = get_type_hints(kind, include_extras=True)
    for each in fields(kind):
        if "option" in each.metadata:
            yield _parameter(each.name, each.metadata)
        elif get_origin(hint := hints[each.name]) is Annotated:
            yield Parameter(
                each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=hint
            )


def _parameter(name: str, metadata: Any) -> Parameter:
    option: Option[Any] = metadata["option"]
    decls = list(option.flags)
    if option.kind is bool and option.default:
        decls = [f"{option.flag}/--no-{option.name}"]
    is_number = option.kind in (int, float)
    declared = typer.Option(
        *decls,
        help=option.help,
        metavar="|".join(option.choices) or option.unit or None,
        callback=lambda value: _checked(option, value),
        min=option.least if is_number else None,
        max=option.most if is_number else None,
        rich_help_panel=metadata["panel"],
    )
    kind: Any = option.kind
    default = Parameter.empty if option.is_required else option.default
    if default is None:
        kind = kind | None
    return Parameter(
        name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, declared]
    )


def _checked(option: Option[Any], value: T) -> T:
    option.check(value)
    return value


Address = Annotated[
    str,
    typer.Option(
        help="Address of the scheduler: host:port or unix:/path; several with commas.",
        envvar="SPLITPOINT_ADDRESS",
    ),
]
CaFile = Annotated[
    str | None,
    typer.Option(
        "--ca",
        help="Authority (PEM) of the scheduler's certificate; turns TLS on. Or SPLITPOINT_CA.",
        metavar="PATH",
    ),
]
TokenFile = Annotated[
    str | None,
    typer.Option(
        help="File of mode 0600 with the token. Or SPLITPOINT_TOKEN_FILE, SPLITPOINT_TOKEN.",
        metavar="PATH",
    ),
]
