"""Options of commands: a dataclass names the declared options, and Typer gets a signature of them.

    @dataclass(frozen=True, slots=True)
    class Options:
        chunk_tokens: int = of(store.CHUNK_TOKENS, "Arena")
        others: Mapping[str, Any] = each_of({"scrub_rate": store.SCRUB_RATE})

    @takes_options
    def command(options: Options) -> None: ...

A `configurable` command also takes `--config` and `--set`, and its `--help` leaves rare options
out. Also declares the options by which commands reach a scheduler and prove their identity.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from inspect import Parameter, Signature
from typing import Annotated, Any, TypeVar

import typer

from splitpoint.options.option import Option
from splitpoint.options.values import CONFIG, SET, given_values

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


def each_of(options: Mapping[str, Option[Any]], panels: str | Mapping[str, str]) -> Any:
    """Declare a field as the values of several options by name; `panels`: of all, or of each."""
    if isinstance(panels, str):
        panels = dict.fromkeys(options, panels)
    return field(
        default_factory=lambda: {name: option.default for name, option in options.items()},
        metadata={"options": options, "panels": panels},
    )


@dataclass(frozen=True, slots=True)
class _Declared:
    """An option of a command. `group`: the field that has it among others; None: it is a field."""

    name: str
    option: Option[Any]
    panel: str | None
    group: str | None = None


def _declared(kind: Any) -> Iterator[_Declared]:
    """Yield the options that a dataclass, or an object of one, declares."""
    for each in fields(kind):
        found = each.metadata
        if "option" in found:
            yield _Declared(each.name, found["option"], found["panel"])
        for name, option in found.get("options", {}).items():
            yield _Declared(name, option, found["panels"][name], each.name)


def declared_options(kind: Any) -> Iterator[tuple[str, Option[Any]]]:
    """Yield name and option of each value that a dataclass, or an object of one, declares."""
    for each in _declared(kind):
        yield each.name, each.option


def values_of(options: Any) -> dict[str, Any]:
    """Return the value of every declared option of a dataclass object by its name."""
    return {
        each.name: getattr(options, each.name)
        if each.group is None
        else getattr(options, each.group)[each.name]
        for each in _declared(options)
    }


def made_of(kind: type[T], values: Mapping[str, Any]) -> T:
    """Return an object of a dataclass from the values of some of its options; the others: default.

    Raises TypeError for a name that is no option's.
    """
    declared: Any = kind
    own = {each.name: each for each in _declared(declared)}
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        group = own[name].group if name in own else None
        if group is None:
            arguments[name] = value
        else:
            arguments.setdefault(group, {})[name] = value
    for each in own.values():
        if each.group in arguments:
            arguments[each.group].setdefault(each.name, each.option.default)
    return kind(**arguments)


def check_options(values: Any) -> None:
    """Check every declared option of a dataclass object. Raises InvalidArgument."""
    given = values_of(values)
    for name, option in declared_options(values):
        option.check(given[name])


def arguments_of(options: Iterable[Option[object]], values: Mapping[str, Any]) -> list[str]:
    """Return the command line that gives a service these options with the values of their fields.

    Options that are None or have their default are left out.
    """
    words: list[str] = []
    for option in options:
        value = values[option.field]
        if value is not None and value != option.default:
            words += [option.flag] if option.kind is bool else [option.flag, str(value)]
    return words


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for Typer with the options of one parameter, a dataclass, as its own.

    They take the place of that parameter; the others are Typer's as usual.
    """
    return _with_options(command, is_configurable=False)


def configurable(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command as `takes_options` does, with `--config` and `--set` for its options.

    Rare options are accepted everywhere, but only `--help-all` shows them.
    """
    return _with_options(command, is_configurable=True)


def _with_options(command: Callable[..., None], *, is_configurable: bool) -> Callable[..., None]:
    taken = list(inspect.signature(command, eval_str=True).parameters.values())
    [(place, options)] = [
        (place, each) for place, each in enumerate(taken) if is_dataclass(each.annotation)
    ]
    kind: Any = options.annotation
    declared = list(_declared(kind))

    @functools.wraps(command)
    def run(**given: Any) -> None:
        values = {each.name: given.pop(each.name) for each in declared}
        if is_configurable:
            config, settings, context = (given.pop(each.name) for each in _CONFIGURATION[:3])
            given.pop(_CONFIGURATION[3].name)
            found = given_values((each.option for each in declared), config, settings or ())
            for each in declared:
                source = context.get_parameter_source(each.name)
                if each.option.field in found and source.name == "DEFAULT":
                    values[each.name] = found[each.option.field]
        command(**{options.name: made_of(kind, values)}, **given)

    taken[place : place + 1] = [
        _parameter(each, is_hidden=is_configurable and each.option.is_rare) for each in declared
    ]
    if is_configurable:
        taken += _CONFIGURATION
    parameters = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in taken]
    run.__dict__["__signature__"] = Signature(parameters)
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _parameter(declared: _Declared, *, is_hidden: bool = False) -> Parameter:
    option = declared.option
    decls = list(option.flags)
    if option.kind is bool and option.default:
        decls = [f"{option.flag}/--no-{option.name}"]
    is_number = option.kind in (int, float)
    parameter = typer.Option(
        *decls,
        help=option.help,
        metavar=option.unit or "|".join(option.choices) or None,
        callback=lambda value: _checked(option, value),
        min=option.least if is_number else None,
        max=option.most if is_number else None,
        rich_help_panel=declared.panel,
        hidden=is_hidden,
    )
    kind: Any = list[option.kind] if option.is_repeatable else option.kind  # type: ignore[name-defined]
    default: Any = Parameter.empty if option.is_required else option.default
    if option.is_repeatable:
        default = None
    if default is None:
        kind = kind | None
    return Parameter(
        declared.name,
        Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, parameter],
    )


def _checked(option: Option[Any], value: T) -> T:
    option.check(value)
    return value


def _show_all(context: typer.Context, value: bool) -> None:
    """Print the help with the rare options, and end."""
    if value:
        for parameter in context.command.params:
            if hasattr(parameter, "hidden"):
                parameter.hidden = False
        # Rich prints it, and what it returns then is empty.
        typer.echo(context.get_help(), nl=False)
        raise typer.Exit


_HELP_ALL = typer.Option(
    "--help-all",
    help="Show the rare options, too, and exit.",
    is_eager=True,
    callback=_show_all,
)
_CONFIGURATION = [
    _parameter(_Declared(CONFIG.field, CONFIG, None)),
    _parameter(_Declared(SET.field, SET, None)),
    Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context),
    Parameter(
        "help_all", Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, _HELP_ALL]
    ),
]
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
