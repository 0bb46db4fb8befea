"""Values of options from `--config FILE` (TOML) and `--set NAME=VALUE`.

    keep-arena = true
    evict-above = 0.9
    worker = ["unix:/run/a.sock", "unix:/run/b.sock"]

`--set` beats the file, and the command line beats both.
"""

from __future__ import annotations

import argparse
import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from splitpoint.errors import InvalidArgument
from splitpoint.host.files import is_private
from splitpoint.options.option import Option, Section, all_options, parser_of

CONFIG: Option[Path | None] = Option(
    "config",
    Path,
    None,
    "File of options (TOML), a line NAME = VALUE for each; absent: none (docs/operations.md).",
    unit="FILE",
)
SET: Option[tuple[str, ...]] = Option(
    "set",
    str,
    (),
    "Set any option by its name, over the file; the command line beats both; may be repeated.",
    unit="NAME=VALUE",
    is_repeatable=True,
)


def given_values(
    options: Iterable[Option[Any]], config: Path | None, settings: Sequence[str]
) -> dict[str, Any]:
    """Return the values of a file and of `--set` by `Option.field`, each of them checked.

    Raises InvalidArgument, which names the file or `--set`, and the key.
    """
    known = {option.name: option for option in options}
    values: dict[str, Any] = {}
    if config is not None:
        content, has_private_mode = _read(config)
        for key, value in content.items():
            option = _option_of(known, key, str(config))
            values[option.field] = _checked(option, value, str(config))
            if not has_private_mode and option.has_secret(values[option.field]):
                raise InvalidArgument(
                    f"{config}: {option.flag} has a secret, and the file is open to others: it "
                    f"must belong to this user, with mode 0600 (chmod 600 {config}), or "
                    f"--{option.secret_file} must name a file with the secret",
                    field=key,
                )
    texts: dict[str, Any] = {}
    for setting in settings:
        key, has_value, text = setting.partition("=")
        option = _option_of(known, key, SET.flag)
        if not has_value:
            raise InvalidArgument(f"{SET.flag} {setting!r} is not NAME=VALUE", field=SET.field)
        if option.is_repeatable:
            texts.setdefault(key, []).append(text)
        else:
            texts[key] = text
    for key, value in texts.items():
        values[known[key].field] = _checked(known[key], value, SET.flag)
    return values


def parse_options(
    program: str,
    description: str | None,
    sections: Sequence[Section],
    arguments: Sequence[str] | None = None,
) -> argparse.Namespace:
    """Return a service's options from its command line, `--config` and `--set`.

    Ends the process with code 2 for what is wrong, as argparse does.
    """
    files = Section("files of options (docs/operations.md)", (CONFIG, SET))
    before = argparse.ArgumentParser(program, add_help=False)
    for option in files.options:
        option.add_to(before)
    given, _ = before.parse_known_args(arguments)
    parser = parser_of(program, description, [*sections, files])
    options = list(all_options(sections))
    try:
        values = given_values(options, given.config, given.set)
    except InvalidArgument as error:
        parser.error(error.message)
    for action in parser._actions:
        if action.dest in values:
            # None tells that the command line has no value.
            action.required, action.default = False, None
    found = parser.parse_args(arguments)
    for name, value in values.items():
        if getattr(found, name) is None:
            setattr(found, name, value)
    return found


def _read(path: Path) -> tuple[Mapping[str, Any], bool]:
    """Return the values of a file, and True if only this user, or root, can read or write it."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file), is_private(os.fstat(file.fileno()))
    except OSError as error:
        reason = error.strerror or str(error)
    except ValueError as error:  # of TOML and of UTF-8
        reason = f"it is not TOML: {error}"
    raise InvalidArgument(f"{CONFIG.flag} {path}: {reason}", field=CONFIG.field)


def _option_of(known: Mapping[str, Option[Any]], key: str, source: str) -> Option[Any]:
    if key in known:
        return known[key]
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise InvalidArgument(f"{source}: there is no option {key!r}{hint}", field=key)


def _checked(option: Option[Any], value: Any, source: str) -> Any:
    """Return a value of a file, or a text, as the option holds it. Raises InvalidArgument."""
    try:
        converted = option.converted(value)
        option.check(converted)
    except InvalidArgument as error:
        raise InvalidArgument(f"{source}: {error.message}", field=option.name) from None
    return converted
