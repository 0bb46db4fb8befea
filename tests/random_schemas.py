"""Random JSON schemas of the features that structured output supports, from a seed.

The features are those that public suites of schemas use most: nested objects with required and
optional members, open names, enums and constants, bounded numbers, arrays and tuples, patterns and
formats, alternatives, references. Texts and arrays are short, so that most answers end.
"""

from __future__ import annotations

import random
import string
from typing import Any

Schema = dict[str, Any]

PATTERNS = (
    "^[a-z]{2,6}$",
    "^[A-Z]{3}-[0-9]{2,4}$",
    "^(red|green|blue)( (light|dark))?$",
    "^#[0-9a-f]{6}$",
    "^v[0-9]+\\.[0-9]{1,2}$",
    "^[0-9]{3}$",
    "^\\d{1,3}(,\\d{3})?$",
    '^[^\\s"\\\\]{1,5}$',
)
# Names: none that an object's own ones match, whose members would have to satisfy both.
NAME_PATTERNS = ("^x[0-9]?$", "^[x-z]{1,3}$", "^[A-Z]{0,3}z$", "^key_[0-9]{1,2}$", "^X.?$")
FORMATS = ("date", "time", "date-time", "ipv4", "uuid", "email")
TEXTS = ('a "quoted" word', "naïve café", "日本", "back\\slash", "😀", "two\nlines", "", "plain")


def random_schema(seed: int) -> Schema:
    """Return the schema of an object. Equal seeds give equal schemas."""
    made = _Maker(random.Random(seed))
    schema = made.object(depth=3)
    if made.definitions:
        schema["$defs"] = made.definitions
    return schema


class _Maker:
    def __init__(self, source: random.Random) -> None:
        self._random = source
        self.definitions: dict[str, Schema] = {}

    def value(self, depth: int) -> Schema:
        kinds = [self.text, self.number, self.choice, self.simple]
        if depth > 0:
            kinds += [
                lambda: self.object(depth - 1),
                lambda: self.open_object(depth - 1),
                lambda: self.array(depth - 1),
                lambda: self.tuple(depth - 1),
                lambda: self.either(depth - 1),
                lambda: self.reference(depth - 1),
            ]
        return self._random.choice(kinds)()

    def object(self, depth: int) -> Schema:
        names = self._random.sample(string.ascii_lowercase, self._random.randint(1, 4))
        names = [self._random.choice((name, f"{name}_name", f"{name} é")) for name in names]
        return {
            "type": "object",
            "properties": {name: self.value(depth) for name in names},
            "required": [name for name in names if self._random.random() < 0.7],
            "additionalProperties": self._random.random() < 0.1 and self.number(),
        }

    def open_object(self, depth: int) -> Schema:
        """Return an object whose members have names that a pattern or nothing bounds."""
        names = self._random.sample(string.ascii_lowercase[:8], self._random.randint(0, 2))
        schema: Schema = {
            "type": "object",
            "properties": {name: self.value(depth) for name in names},
            "required": names,
            "additionalProperties": False,
        }
        by = self._random.choice(("pattern",) * 6 + ("any", "both"))
        if by != "any":
            pattern = self._random.choice(NAME_PATTERNS)
            schema["patternProperties"] = {pattern: self.value(depth)}
        if by != "pattern":
            schema["additionalProperties"] = self._random.choice((True, {"type": "boolean"}))
        # One member more than the named ones is the most that can be promised.
        schema["minProperties"] = len(names) + self._random.randint(0, 1)
        schema["maxProperties"] = schema["minProperties"] + self._random.randint(0, 2)
        return schema

    def array(self, depth: int) -> Schema:
        least = self._random.randint(0, 2)
        most = least + self._random.randint(0, 2)
        return {
            "type": "array",
            "items": self.value(depth),
            "minItems": least,
            "maxItems": max(1, most),
        }

    def tuple(self, depth: int) -> Schema:
        count = self._random.randint(1, 3)
        return {
            "type": "array",
            "prefixItems": [self.value(depth) for _ in range(count)],
            "items": False,
            "minItems": count,
        }

    def either(self, depth: int) -> Schema:
        return {"anyOf": [self.value(depth) for _ in range(self._random.randint(2, 3))]}

    def reference(self, depth: int) -> Schema:
        name = f"part{len(self.definitions)}"
        self.definitions[name] = {}  # taken, whatever is made within
        self.definitions[name] = self.value(depth)
        return {"$ref": f"#/$defs/{name}"}

    def text(self) -> Schema:
        least = self._random.randint(0, 3)
        return self._random.choice(
            (
                {
                    "type": "string",
                    "minLength": least,
                    "maxLength": least + self._random.randint(1, 8),
                },
                {"type": "string", "pattern": self._random.choice(PATTERNS)},
                {"type": "string", "format": self._random.choice(FORMATS)},
            )
        )

    def number(self) -> Schema:
        least = self._random.randint(-1000, 1000)
        most = least + self._random.randint(0, 2000)
        return self._random.choice(
            (
                {"type": "integer", "minimum": least, "maximum": most},
                {"type": "integer", "exclusiveMinimum": least, "exclusiveMaximum": most + 2},
                {"type": "number", "minimum": least / 8, "maximum": most / 8},
                {"type": "number", "exclusiveMinimum": least, "maximum": least + 0.5},
                {"type": "integer", "minimum": 0, "maximum": 9999, "multipleOf": 5},
            )
        )

    def choice(self) -> Schema:
        some = self._random.sample(TEXTS, self._random.randint(1, 4))
        return self._random.choice(
            (
                {"enum": [*some, self._random.randint(-9, 9), None]},
                {"type": "string", "enum": some},
                {"const": self._random.choice((*some, 3, True, {"k": [1]}))},
            )
        )

    def simple(self) -> Schema:
        return self._random.choice(
            ({"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]})
        )
