"""A gateway process before two schedulers: one hangs within a stream, and the stream goes on."""

from __future__ import annotations

import http.client
import json
import signal
from contextlib import closing
from typing import Any

from fleet import fleet
from test_gateway_process import SECONDS, serving

from splitpoint.client import Client

PROMPT = "class Account:\n    def __init__(self"
TOKENS = 400


def test_a_stream_leaves_a_scheduler_that_hangs() -> None:
    with fleet(1) as running:
        worker = running.start_worker(0)
        schedulers = [running.start_scheduler(number) for number in range(2)]
        worker.wait_ready()
        addresses = [each.wait_ready() for each in schedulers]
        for address in addresses:
            with Client(address) as client:
                client.wait_ready(60)
        with serving("--listen", "127.0.0.1:0", "--scheduler", ",".join(addresses)) as (_, gateway):
            with Client(addresses[1]) as client:
                expected = client.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True).complete()
            body = {"model": "small-llama", "prompt": PROMPT, "max_tokens": TOKENS}
            more: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "stream": True}
            more |= {"stream_options": {"include_usage": True}}
            with closing(http.client.HTTPConnection(gateway, timeout=SECONDS)) as connection:
                headers = {"content-type": "application/json"}
                connection.request("POST", "/v1/completions", json.dumps(body | more), headers)
                answer = connection.getresponse()
                texts: list[str] = []
                usage: dict[str, int] = {}
                for line in answer:
                    if not line.startswith(b"data: {"):
                        continue
                    event = json.loads(line[6:])
                    usage = event["usage"] or usage
                    texts += [choice["text"] for choice in event["choices"]]
                    if len(texts) == 3:
                        schedulers[0].signal(signal.SIGSTOP)
            assert len(texts) > 3
            assert "".join(texts) == expected.text
            assert usage["completion_tokens"] == TOKENS
        schedulers[0].signal(signal.SIGCONT)
