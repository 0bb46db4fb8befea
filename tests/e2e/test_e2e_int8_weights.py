"""`up --weights int8` with real processes: it answers, reuses its cache, and says what it is; its
arena is no native stack's. About 25 s."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from own_names import instance_name
from small_model import small_model
from splitpoint_command import splitpoint
from test_e2e_keep_arena import complete
from test_e2e_restarts import SECONDS, wait_sealed
from up_process import up_process, wait_until_up

from splitpoint.config import arena_path, remove_tree
from splitpoint.host.processor import compiler
from splitpoint.planning.plan import ReasonKind

INSTANCE = instance_name("int8")


@pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")
def test_an_int8_stack_answers_and_keeps_its_cache_to_itself() -> None:
    command = [
        *(sys.executable, "-m", "splitpoint_cli", "up", "--device", "cpu", "--threads", "1"),
        *("--model", str(small_model()), "--host-memory", "64MiB", "--device-memory", "128MiB"),
        *("--keep-arena", "--listen", "127.0.0.1:0", "--instance", INSTANCE),
    ]
    try:
        with up_process([*command, "--weights", "int8"]) as process:
            printed = wait_until_up(process)
            address = printed.partition("scheduler  ")[2].splitlines()[0]
            cold = complete(address)
            wait_sealed(printed.partition("store      ")[2].splitlines()[0])
            warm = complete(address)
            status = json.loads(splitpoint("status", "--address", address, "--json").stdout)
            assert "weights are int8" in splitpoint("status", "--address", address).stdout
            process.terminate()
            assert process.wait(SECONDS) == 0
        assert cold.usage.cached_tokens == 0 < warm.usage.cached_tokens
        assert warm.token_ids == cold.token_ids
        assert warm.plan is not None
        assert dict(warm.plan.reasons)[ReasonKind.LOSSY_WEIGHTS] == ("int8",)
        assert [each["weight_format"] for each in status["workers"]] == ["int8"]
        assert [each["weight_format"] for each in status["models"]] == ["int8"]

        native = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        assert native.returncode != 0
        assert "Traceback" not in native.stderr
        assert "another model" in native.stderr
    finally:
        remove_tree(arena_path(INSTANCE).parent)
