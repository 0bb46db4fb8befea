"""Print the fields of one kind of body as a table for the documentation.

python -m gateway_service.openapi.tables chat
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence

from gateway_service.openai.batches import BATCH_FIELDS
from gateway_service.openai.chat_completions import CHAT_FIELDS
from gateway_service.openai.completions import COMPLETION_FIELDS
from gateway_service.openai.embeddings import EMBEDDING_FIELDS
from gateway_service.openai.fields import Field, Table, Use
from gateway_service.openai.responses import RESPONSE_FIELDS
from gateway_service.openai.tokens import DETOKENIZE_FIELDS, TOKENIZE_FIELDS

TABLES: dict[str, Table] = {
    "chat": CHAT_FIELDS,
    "completions": COMPLETION_FIELDS,
    "responses": RESPONSE_FIELDS,
    "embeddings": EMBEDDING_FIELDS,
    "batches": BATCH_FIELDS,
    "tokenize": TOKENIZE_FIELDS,
    "detokenize": DETOKENIZE_FIELDS,
}


def rows(table: Table) -> Iterator[str]:
    """Yield the lines of the table: what is read, then what is ignored and what is refused."""
    yield "| field | default | meaning |"
    yield "|---|---|---|"
    for field in table.fields.values():
        if field.use is Use.READ:
            star = "*" if field.is_extension else ""
            yield f"| `{field.name}`{star} | {_default(field)} | {_cell(field.help)} |"
    others = [field for field in table.fields.values() if field.use is not Use.READ]
    if not others:
        return
    yield ""
    yield "| field | is | why |"
    yield "|---|---|---|"
    for field in others:
        star = "*" if field.is_extension else ""
        yield f"| `{field.name}`{star} | {_use(field)} | {_cell(field.help)} |"


def _default(field: Field) -> str:
    if field.is_required:
        return "required"
    return "" if field.default is None else f"`{json.dumps(field.default)}`"


def _use(field: Field) -> str:
    if field.use is Use.IGNORED:
        return "ignored"
    neutral = " or ".join(f"`{json.dumps(value)}`" for value in field.neutral)
    return f"refused, except {neutral}" if neutral else "refused"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(arguments: Sequence[str]) -> int:
    """Return exit code 2 for an unknown name."""
    if len(arguments) != 1 or arguments[0] not in TABLES:
        print(f"name one of {', '.join(TABLES)}", file=sys.stderr)
        return 2
    print("\n".join(rows(TABLES[arguments[0]])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
