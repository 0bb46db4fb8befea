"""One option of a command line: its name, type, unit, default, bounds and help."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar
from urllib.parse import urlsplit

from splitpoint.config import parse_rate, parse_size
from splitpoint.errors import InvalidArgument

T_co = TypeVar("T_co", covariant=True)

# Units that decide how a text is read; both stay texts until they are used.
SIZE = "SIZE"
RATE = "RATE"
# Types of TOML values, besides texts, that an option of this kind takes: a size may be a number.
_TOML_TYPES: Mapping[type, tuple[type, ...]] = {
    bool: (bool,),
    int: (int,),
    float: (int, float),
    str: (int, float),
}
_WANTED = {bool: "true or false", int: "an integer", float: "a number"}


@dataclass(frozen=True, slots=True)
class Option(Generic[T_co]):
    """One option.

    Attributes:
        name: without dashes, such as "chunk-tokens".
        kind: type of the value; bool is a flag without a value.
        default: the value if the option is absent; None if the help text says what happens then.
        help: a phrase that ends with a full stop.
        unit: what `--help` shows for the value, such as SIZE, SECONDS or PATH.
        choices: the allowed values; empty if there is no such list.
        least, most: inclusive bounds of a number.
        former_name: a name of earlier versions that is still understood; empty if there is none.
        is_rare: True if the `--help` of `up` and `generate` leaves the option out.
        secret_file: of a secret, or of a URL with room for a password: the option that takes
            it from a file of its own; empty for what is no secret.
        dest: the name of the value in Python; empty: the name with underscores.
    """

    name: str
    kind: type
    default: T_co
    help: str
    unit: str = ""
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    is_required: bool = False
    is_repeatable: bool = False
    former_name: str = ""
    is_rare: bool = False
    secret_file: str = ""
    dest: str = ""

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def flags(self) -> tuple[str, ...]:
        """All spellings."""
        return (self.flag, f"--{self.former_name}") if self.former_name else (self.flag,)

    @property
    def field(self) -> str:
        """The name of the value in Python."""
        return self.dest or self.name.replace("-", "_")

    def has_secret(self, value: object) -> bool:
        """Return True if the value is a secret, or a URL with a password in it."""
        if not self.secret_file or not isinstance(value, str):
            return False
        if self.unit != "URL":
            return True
        try:
            return urlsplit(value).password is not None
        except ValueError:  # not a URL: what uses it refuses it
            return False

    def check(self, value: object) -> None:
        """Raise InvalidArgument if the value is no choice, size or rate, or out of bounds.

        A list has several values.
        """
        if isinstance(value, list | tuple):
            for each in value:
                self.check(each)
            return
        if self.choices and value is not None and value not in self.choices:
            raise InvalidArgument(
                f"{self.flag}: {str(value)!r} is not one of {', '.join(self.choices)}",
                field=self.name,
            )
        if isinstance(value, str) and self.unit == SIZE:
            parse_size(value, field=self.name)
        elif isinstance(value, str) and self.unit == RATE:
            parse_rate(value, field=self.name)
        elif isinstance(value, int | float):
            least, most = self.least, self.most
            if isinstance(value, float) and not math.isfinite(value):
                raise self._refused("a finite number", value)
            if least is not None and value < least:
                raise self._refused(f"at least {_shown(least)}", value)
            if most is not None and value > most:
                raise self._refused(f"at most {_shown(most)}", value)

    def converted(self, value: object) -> object:
        """Return a text, or a value of a TOML file, as the option's type; unchecked.

        Raises InvalidArgument for a value of another type.
        """
        if self.is_repeatable:
            several = value if isinstance(value, list) else [value]
            return [self._converted(each) for each in several]
        return self._converted(value)

    def _converted(self, value: object) -> object:
        if isinstance(value, str):
            if self.kind is not bool:
                with suppress(ValueError):
                    return self.kind(value)
            elif value in ("true", "false"):
                return value == "true"
        elif type(value) in _TOML_TYPES.get(self.kind, ()):
            return self.kind(value)
        wanted = _WANTED.get(self.kind, "a text")
        raise InvalidArgument(f"{self.flag} is {wanted}, not {value!r}", field=self.name)

    def _refused(self, wanted: str, value: float) -> InvalidArgument:
        return InvalidArgument(f"{self.flag} is {wanted}, not {_shown(value)}", field=self.name)

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        if self.kind is bool:
            parser.add_argument(self.flag, action="store_true", help=self.help)
        elif self.is_repeatable:
            parser.add_argument(
                self.flag, action="append", default=[], metavar=self.unit, help=self.help
            )
        else:
            parser.add_argument(
                *self.flags,
                dest=self.field,
                type=self.kind,
                default=self.default,
                required=self.is_required,
                choices=self.choices or None,
                metavar=None if self.choices else self.unit or None,
                help=self._help,
            )

    @property
    def _help(self) -> str:
        if self.is_required or self.default in (None, ""):
            return self.help
        shown = f"{self.default:g}" if isinstance(self.default, float) else self.default
        return f"{self.help} Default: {shown}."


def _shown(value: float) -> str:
    """Return a number as a user writes it: an integer with all its digits."""
    return str(value) if isinstance(value, int) else f"{value:g}"


@dataclass(frozen=True, slots=True)
class Section:
    """Options that `--help` shows together."""

    title: str
    options: tuple[Option[object], ...]


def parser_of(
    program: str, description: str | None, sections: Iterable[Section]
) -> argparse.ArgumentParser:
    """Return a parser of the sections' options."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    for section in sections:
        group = parser.add_argument_group(section.title)
        for option in section.options:
            option.add_to(group)
    return parser


def all_options(sections: Iterable[Section]) -> Iterator[Option[object]]:
    for section in sections:
        yield from section.options


def check_values(sections: Iterable[Section], values: Mapping[str, object]) -> None:
    """Check every value that an option of the sections has. Raises InvalidArgument."""
    for option in all_options(sections):
        option.check(values.get(option.field))
