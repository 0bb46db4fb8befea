"""A stack of real processes with a gateway in front, and the official client of OpenAI.

Store, worker, scheduler and gateway serve the small model, or another one. `tests/fork_server.py`
starts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import openai
from fleet import Fleet, fleet
from fork_server import Child

from splitpoint.client import Client

# Teaches calls in the form of Hermes, and is so plain that the bundled model repeats the calls of
# its prompt: it only knows Python.
HERMES_TEMPLATE = """\
{%- for tool in tools or [] -%}
# {{ tool.function | tojson }}
{% endfor %}
{%- for message in messages %}
{%- if message.content %}{{ message.content + "\\n" }}{% endif %}
{%- for call in message.tool_calls or [] -%}
<tool_call>{{ call.function | tojson }}</tool_call>
{% endfor %}
{%- endfor %}"""
MODEL = "small-llama"
BUNDLED = Path(__file__).resolve().parents[2] / "models" / "stdlib-llama"


@dataclass
class GatewayStack:
    """A running stack. `url` is the gateway's, without a path."""

    fleet: Fleet
    url: str

    @property
    def scheduler_address(self) -> str:
        return self.fleet.address("s", 0)

    def client(self, key: str = "none") -> openai.OpenAI:
        """Return a client that repeats nothing."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def async_client(self, key: str = "none") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def begin_gateway(self, *options: str, failpoint: str = "") -> Child:
        """Start a further gateway, and do not wait for it."""
        return self.fleet.server.start(
            "gateway_service",
            *("--listen", "127.0.0.1:0", "--scheduler", self.scheduler_address),
            *options,
            failpoint=failpoint,
        )

    def start_gateway(self, *options: str) -> str:
        """Start a further gateway; return its address, host:port."""
        return self.begin_gateway(*options).wait_ready()


@contextmanager
def gateway_stack(
    *,
    model: Path | None = None,
    chat_template: str | None = None,
    scheduler_options: Sequence[str] = (),
) -> Iterator[GatewayStack]:
    """Start a stack with one worker, of the small model or another; end it without a trace."""
    with fleet(1, model=model) as running:
        options = [*scheduler_options]
        if chat_template is not None:
            template = running.folder / "template.jinja"
            template.write_text(chat_template)
            options += ["--chat-template", str(template)]
        worker = running.start_worker(0)
        scheduler = running.start_scheduler(0, *options)
        stack = GatewayStack(running, "")
        worker.wait_ready()
        scheduler.wait_ready()
        with Client(stack.scheduler_address) as client:
            client.wait_ready(60)
        stack.url = f"http://{stack.start_gateway()}"
        yield stack


def logs(stack: GatewayStack) -> str:
    """Return everything that the stack's processes have logged."""
    return "".join(child.log.read_text() for child in stack.fleet.server.children)
