"""`splitpoint up` and its services as users start them: each a new interpreter, none forked."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

from own_names import instance_name
from small_model import small_model
from up_process import up_process, wait_until_up

from splitpoint.client import Client

# Python reads it when it starts: forked_python.py starts a new interpreter for it.
VARIABLE = ("PYTHONHASHSEED", "7")


def test_a_stack_of_new_interpreters_answers() -> None:
    command = [
        *(sys.executable, "-m", "splitpoint_cli", "up", "--device", "cpu", "--threads", "1"),
        *("--model", str(small_model()), "--host-memory", "64MiB", "--listen", "127.0.0.1:0"),
        *("--instance", instance_name("interpreters")),
    ]
    with up_process(command, dict([VARIABLE])) as process:
        (address,) = re.findall(r"scheduler  (\S+)", wait_until_up(process))
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 3, "store, worker and scheduler"
        for process_id in (process.pid, *children):
            # What a process was started with: a forked one has that of its parent.
            given = Path(f"/proc/{process_id}/environ").read_bytes().split(b"\0")
            assert "=".join(VARIABLE).encode() in given
        with Client(address) as client:
            answer = client.generate("def total(", max_tokens=4, ignore_eos=True).complete()
        assert len(answer.token_ids) == 4
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
