"""`splitpoint chat` as a user runs it: from a pipe, and at a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_scheduler import Script, fake_scheduler

from splitpoint.errors import InvalidArgument, Unavailable
from splitpoint_cli.stack.child import child_environment

COMMAND = [sys.executable, "-m", "splitpoint_cli", "chat"]
SECONDS = 30.0


@pytest.fixture
def script(socket_address: str) -> Iterator[Script]:
    with fake_scheduler(socket_address) as script:
        yield script


def chat(script: Script, stdin: str | bytes, *options: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*COMMAND, "--address", script.address, *options],
        input=stdin.encode() if isinstance(stdin, str) else stdin,
        capture_output=True,
        timeout=60,
        env=child_environment({}),
        check=False,
    )
    return subprocess.CompletedProcess(
        done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
    )


def messages(script: Script, turn: int) -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads(script.requests[turn].chat.messages)
    return found


# -- a pipe ---------------------------------------------------------------------------------


def test_each_line_is_a_turn_and_the_history_grows(script: Script) -> None:
    done = chat(script, "one\ntwo\n", "--system", "Be short.")
    assert (done.returncode, done.stdout, done.stderr) == (0, "one\ntwo\n", "")
    assert messages(script, 0) == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "one"},
    ]
    assert messages(script, 1) == [
        *messages(script, 0),
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "two"},
    ]
    assert script.requests[0].sampling.fills_context
    assert not script.requests[0].sampling.HasField("max_tokens")


def test_options_are_passed_on(script: Script) -> None:
    done = chat(
        *(script, "hi", "--max-tokens", "5", "--temperature", "0.5", "--top-k", "3"),
        *("--seed", "7", "--stop", "x", "--repetition-penalty", "1.5", "--cache-salt", "s"),
        *("--logit-bias", "4=-100", "--regex", "a+", "--keep-special-tokens"),
        *("--priority", "2", "--residency", "streamed", "--speculate", "off", "--worker", "1"),
    )
    assert done.returncode == 0, done.stderr
    request = script.requests[0]
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.fills_context) == (5, False)
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.5, 3, 7)
    assert (dict(sampling.logit_bias), sampling.structured_output.regex) == ({4: -100}, "a+")
    assert sampling.keeps_special_tokens
    assert (list(sampling.stop), sampling.repetition_penalty) == (["x"], 1.5)
    assert (request.cache_salt, request.priority, request.worker_id) == (b"s", 2, "1")
    assert (request.residency, request.speculation.method) == (2, 1)


def test_figures_and_the_plan_of_each_turn_are_told_when_asked_for(script: Script) -> None:
    done = chat(script, "a\nb\n", "--explain")
    assert done.stdout == "a\nb\n"
    told = done.stderr.splitlines()
    assert len(told) == 8
    for line in told[::4]:
        assert "2 of 3 prompt tokens cached" in line
        assert "first token after 250 ms" in line
    assert told[1::4] == ["why: loaded: because this is a test"] * 2


def test_commands(script: Script, tmp_path: Path) -> None:
    saved = tmp_path / "a chat.json"
    done = chat(
        script,
        "/system Be kind.\nfirst\n/stats\n"
        f"/save {saved}\n/reset\n/system\nsecond\n/system -\n/save\n/quit\nnever\n",
    )
    assert (done.returncode, done.stdout) == (0, "first\nsecond\n"), done.stderr
    assert len(script.requests) == 2
    assert messages(script, 0)[0] == {"role": "system", "content": "Be kind."}
    assert messages(script, 1) == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "second"},
    ]
    assert re.search(r"1 +3 +2 +67% +0 \(load\)", done.stderr), done.stderr
    assert "2 of 3 prompt tokens cached (67%), 5 tokens generated" in done.stderr
    for remark in ("forgot 1 turn", "system prompt: Be kind.", "system prompt: none"):
        assert remark in done.stderr
    found = json.loads(saved.read_text())
    assert found["messages"] == [
        {"role": "user", "content": "second"},
        {"role": "assistant", "content": "second"},
    ]
    assert found["turns"][0]["usage"]["cached_tokens"] == 2
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600


def test_help_lists_the_commands(script: Script) -> None:
    done = chat(script, "/help\n")
    assert (done.returncode, done.stdout) == (0, "")
    for name in ("/system", "/reset", "/save", "/stats", "/help", "/quit"):
        assert re.search(rf"^{name}\b", done.stderr, re.MULTILINE)


def test_json_is_all_there_is(script: Script, tmp_path: Path) -> None:
    target = tmp_path / "chat.json"
    done = chat(script, '"""\ntwo\nlines\n"""\n/stats\n', "--json", "--output", str(target))
    told = json.loads(done.stdout)
    assert told["messages"][0] == {"role": "user", "content": "two\nlines"}
    assert told["turns"][0]["text"] == "two\nlines"
    assert json.loads(target.read_text()) == told


@pytest.mark.parametrize(
    ("stdin", "status", "message"),
    [
        ("/nonsense\nnever\n", 2, "there is no command /nonsense"),
        ("/save\n", 2, "/save needs the name of a file"),
        ("/save /no/such/folder/file\n", 2, "/no/such/folder is no folder"),
        ('"""\nopen\n', 2, "ended inside of a message"),
        (b"\xff\xfe\n", 2, "not UTF-8 text"),
    ],
)
def test_a_pipe_ends_at_the_first_error(
    script: Script, stdin: str | bytes, status: int, message: str
) -> None:
    done = chat(script, stdin)
    assert done.returncode == status
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert script.requests == []


def test_a_file_is_not_overwritten(script: Script, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    done = chat(script, f"/save {tmp_path}/mine\n")
    assert done.returncode == 2
    assert (tmp_path / "mine").read_text() == "kept"


def test_a_model_without_a_template_is_refused_before_anything_is_read(script: Script) -> None:
    script.has_chat_template = False
    done = chat(script, "hi\n")
    assert done.returncode == 1
    assert "FAILED_PRECONDITION: tiny has no chat template" in done.stderr
    assert script.requests == []


def test_a_failed_turn_ends_a_pipe_with_its_code(script: Script) -> None:
    script.failures = [InvalidArgument("the template refuses this", field="chat.messages")]
    done = chat(script, "hi\nagain\n")
    assert done.returncode == 2
    assert "the template refuses this" in done.stderr
    assert len(script.requests) == 1


# -- a terminal ----------------------------------------------------------------------------


class Terminal:
    """The command at a terminal of its own, as a person has it."""

    def __init__(self, script: Script, *options: str) -> None:
        self._own, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [*COMMAND, "--address", script.address, *options],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env=child_environment({"TERM": "dumb", "COLUMNS": "200"}),
        )
        os.close(theirs)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._own, text.encode())

    def wait_for(self, text: str) -> str:
        """Return what is shown up to this text; the next call begins behind it."""
        assert self._is_shown(text, SECONDS), f"no {text!r} in {self.shown!r}"
        before, _, self.shown = self.shown.partition(text)
        return before

    def _is_shown(self, text: str, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while text not in self.shown:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if select.select([self._own], [], [], left)[0]:
                try:
                    self.shown += os.read(self._own, 4096).decode(errors="replace")
                except OSError:
                    raise AssertionError(f"it ended without {text!r}: {self.shown!r}") from None
        return True

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def interrupt_until(self, text: str) -> None:
        """Press Ctrl-C, and again each two seconds, until this text is shown.

        readline looks for signals before it waits for a key, not at once: Python notices a
        signal between the two with the next key or signal only.
        """
        for _ in range(round(SECONDS / 2)):
            self.interrupt()
            if self._is_shown(text, 2.0):
                return
        raise AssertionError(f"no {text!r} in {self.shown!r}")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):
            os.close(self._own)


@pytest.fixture
def terminal(script: Script) -> Iterator[Terminal]:
    opened = Terminal(script)
    yield opened
    opened.close()


def test_a_terminal_is_greeted_and_told_the_plan(terminal: Terminal, script: Script) -> None:
    greeting = terminal.wait_for("> ")
    assert "tiny, context 64 tokens" in greeting
    terminal.type("hello\n")
    told = terminal.wait_for("why: loaded: because this is a test")
    assert "hello\r\nhello\r\n" in told
    assert "2 of 3 prompt tokens cached" in told
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.process.wait(SECONDS) == 0
    assert len(script.requests) == 1


def test_ctrl_c_stops_the_answer_and_not_the_program(terminal: Terminal, script: Script) -> None:
    script.endless = True
    terminal.wait_for("> ")
    terminal.type("ab\n")
    terminal.wait_for("ababab")
    terminal.interrupt()
    terminal.wait_for("stopped")
    assert script.cancelled.wait(SECONDS)
    terminal.wait_for("> ")
    script.endless = False
    terminal.type("next\n")
    terminal.wait_for("why:")
    # What had come of the answer is a part of the conversation.
    said = messages(script, 1)
    assert [message["role"] for message in said] == ["user", "assistant", "user"]
    assert said[1]["content"].startswith("ababab")
    terminal.wait_for("> ")
    terminal.type("/quit\n")
    assert terminal.process.wait(SECONDS) == 0


def test_ctrl_c_while_typing_drops_the_line(terminal: Terminal, script: Script) -> None:
    terminal.wait_for("> ")
    terminal.type("half a mess")
    terminal.wait_for("half a mess")
    terminal.interrupt_until("leaves")
    terminal.wait_for("leaves")
    terminal.wait_for("> ")
    terminal.type("whole\n")
    terminal.wait_for("why:")
    assert messages(script, 0)[-1]["content"] == "whole"


def test_an_error_leaves_a_terminal_where_it_was(terminal: Terminal, script: Script) -> None:
    script.failures = [Unavailable("no worker is ready", reason="TOO_MANY_MOVES")]
    terminal.wait_for("> ")
    terminal.type("one\n")
    terminal.wait_for("UNAVAILABLE: no worker is ready")
    terminal.wait_for("> ")
    terminal.type("/bad\n")
    terminal.wait_for("there is no command /bad")
    terminal.wait_for("> ")
    terminal.type("two\n")
    terminal.wait_for("why:")
    # The failed turn is not a part of the conversation.
    assert messages(script, -1) == [{"role": "user", "content": "two"}]


def test_control_characters_of_an_answer_do_not_reach_a_terminal(
    terminal: Terminal, script: Script
) -> None:
    terminal.wait_for("> ")
    terminal.type('"""a\x16\x1b]0;title\x16\x07b"""\n')
    shown = terminal.wait_for("why:")
    assert json.loads(script.requests[0].chat.messages)[0]["content"] == "a\x1b]0;title\x07b"
    answer = shown.rpartition('"""')[2]
    assert "a\N{REPLACEMENT CHARACTER}]0;title\N{REPLACEMENT CHARACTER}b" in answer
    assert "\x1b]0;" not in answer
