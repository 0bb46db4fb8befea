"""What it costs to turn a chat into tokens: its template, the process around that, the tokenizer.

The bundled model's template and tokenizer, with conversations of 2, 20 and 200 messages of 100
characters. Each is rendered in this process, then by the process in which the scheduler renders
it, and tokenized; the median of several runs.

    python -m benchmarks.chat_rendering [--runs N] [--json] [--output FILE]
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from benchmarks.harness import finish, parser_of
from splitpoint.chat.messages import Chat
from splitpoint.chat.renderer import ChatRenderer
from splitpoint.chat.source import read_templates
from splitpoint.chat.template import ModelTemplates
from splitpoint.checkpoint.resolve import resolve_model
from splitpoint.checkpoint.text import Tokenizer
from splitpoint_cli.bench.shared.report import commit, hardware

MESSAGE_COUNTS = (2, 20, 200)
CONTENT = "def add(left, right):\n    return left + right\n\n\n".ljust(100, "#")
RUNS = 200


def chat_of(count: int) -> Chat:
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": CONTENT} for n in range(count)]
    return Chat(json.dumps(messages))


def seconds_of(call: Callable[[], object], runs: int) -> float:
    times = []
    for _ in range(runs):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def measure(runs: int) -> dict[str, Any]:
    folder = resolve_model(None)
    templates, tokenizer = read_templates(folder), Tokenizer.load(folder)
    if templates is None or tokenizer is None:
        raise RuntimeError(f"{folder} has no chat template or no tokenizer")
    here = ModelTemplates(templates.default, templates.tool_use, templates.special_tokens)
    begun = time.perf_counter()
    renderer = ChatRenderer(templates)
    start_seconds = time.perf_counter() - begun
    rows = []
    try:
        for count in MESSAGE_COUNTS:
            chat = chat_of(count)
            text = renderer.render(chat)
            rows.append(
                {
                    "messages": count,
                    "tokens": len(tokenizer.encode(text)),
                    "template_seconds": seconds_of(partial(here.render, chat), runs),
                    "process_seconds": seconds_of(partial(renderer.render, chat), runs),
                    "tokenizer_seconds": seconds_of(partial(tokenizer.encode, text), runs),
                }
            )
    finally:
        renderer.close()
    return {
        "benchmark": "chat_rendering",
        "start_seconds": start_seconds,
        "rows": rows,
        "runs": runs,
        "hardware": hardware(),
        "commit": commit(),
    }


def show(result: Mapping[str, Any]) -> None:
    print("messages  tokens  template us  in its process us  tokenizer us")
    for row in result["rows"]:
        times = (row[f"{part}_seconds"] * 1e6 for part in ("template", "process", "tokenizer"))
        template, process, tokenizer = times
        print(
            f"{row['messages']:8}  {row['tokens']:6}  {template:11.0f}  {process:17.0f}"
            f"  {tokenizer:12.0f}"
        )
    print(f"start of a process: {result['start_seconds'] * 1e3:.0f} ms")


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=RUNS)
    arguments = parser.parse_args()
    finish(arguments, measure(arguments.runs), show)
    return 0


if __name__ == "__main__":
    sys.exit(main())
