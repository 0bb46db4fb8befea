"""A template is a program that came with a model: it can neither harm nor hold up its service."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from splitpoint.chat import renderer
from splitpoint.chat.messages import Chat
from splitpoint.chat.renderer import ChatRenderer
from splitpoint.chat.source import ChatTemplates
from splitpoint.errors import InvalidArgument, ResourceExhausted, SplitpointError, Unavailable
from splitpoint.limited import pool
from splitpoint.limited.child import MOST_SECONDS

# A template does its worst only when a message asks for it: not as it is compiled and tried.
WHEN_ASKED = "{% for m in messages %}{% if m.role == 'worst' %}WORST{% endif %}ok{% endfor %}"
FINE = Chat('[{"role": "user", "content": "x"}]')
# A limit of time for attacks that use it up: as good as the usual one, and sooner there. Others
# have one that nothing reaches, however slow the machine is.
SHORT_SECONDS, LONG_SECONDS = 0.5, 100.0
TOO_SLOW = "takes more than 0.5 s"
WORST = Chat('[{"role": "worst", "content": "x"}]')


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait longer than a service does: 2 s of a busy machine's processor take a while."""
    monkeypatch.setattr(pool, "PATIENCE_SECONDS", 120.0)


@contextmanager
def rendering(
    template: str, *, most: int = 2, most_seconds: float = MOST_SECONDS
) -> Iterator[ChatRenderer]:
    chats = ChatRenderer(ChatTemplates(template), most=most, most_seconds=most_seconds)
    try:
        yield chats
    finally:
        chats.close()
        assert children() == []


def children(parent: int | None = None) -> list[int]:
    """Rendering processes of a process; None: of this one."""
    found = []
    for path in Path(f"/proc/{parent or os.getpid()}/task").glob("*/children"):
        found += [int(pid) for pid in path.read_text().split()]
    return [pid for pid in found if "splitpoint.chat.process" in command_of(pid)]


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def wait_for_end(pid: int) -> None:
    """Wait until a process is gone, or waits for its parent only."""
    for _ in range(1500):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.01)
    raise TimeoutError(f"the process {pid} did not end")


LONG_LOOP = "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4
ATTACKS = {
    "calls that branch": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{{ f(60) }}",
        TOO_SLOW,
    ),
    "a call of itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself"),
    "a huge range": ("{{ range(10 ** 12) | list }}", "Range too big"),
    "a multiplied text": ("{{ 'a' * 10 ** 11 }}", "memory"),
    "a padded text": ("{{ 'a'.ljust(10 ** 11) }}", "memory"),
    "a width in a format": ("{{ '%100000000000d' % 1 }}", "memory|cannot print"),
    "a doubled text": (
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}"
        "{% endfor %}{{ ns.s }}",
        "memory",
    ),
    "much output": (
        "{% for a in range(99999) %}{{ 'a' * 100 }}{% endfor %}",
        "more than 4,194,304",
    ),
    "wide output": ("{{ 'ä' * 3000000 }}", "more than 4,194,304"),
    # Not of constants, which the compiler would compute.
    "a huge power": (
        "{% set n = m.role | length + 4 %}{{ n ** (n ** n) }}",
        "takes more|cannot print|memory",
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_time_memory_and_output_are_bounded(attack: str) -> None:
    what, said = ATTACKS[attack]
    most_seconds = SHORT_SECONDS if "takes more" in said else LONG_SECONDS
    with rendering(WHEN_ASKED.replace("WORST", what), most_seconds=most_seconds) as chats:
        with pytest.raises(InvalidArgument, match=said) as caught:
            chats.render(WORST)
        assert caught.value.field == "chat.messages"
        # The next chat is served.
        assert chats.render(FINE) == "ok"


def test_an_endless_template_ends_after_two_seconds_of_the_processor() -> None:
    with rendering(WHEN_ASKED.replace("WORST", LONG_LOOP)) as chats:
        before = os.times()
        with pytest.raises(InvalidArgument, match="takes more than 2 s"):
            chats.render(WORST)
        after = os.times()
        spent = (after.children_user + after.children_system) - (
            before.children_user + before.children_system
        )
        assert MOST_SECONDS * 0.9 < spent < MOST_SECONDS + 2
        # This process only waited: its own threads run meanwhile.
        assert (after.user + after.system) - (before.user + before.system) < 1
        # The next chat is served.
        assert chats.render(FINE) == "ok"


def test_a_template_that_is_endless_from_the_start_is_refused() -> None:
    for template in (LONG_LOOP, "{{ 'a' * 10 ** 11 }}{% bad %}"):
        said = r"takes more than 0.5 s to compile|cannot be used"
        with pytest.raises(InvalidArgument, match=said):
            ChatRenderer(ChatTemplates(template), most_seconds=SHORT_SECONDS)
    assert children() == []


ESCAPES = [
    "{{ messages.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages['__class__'] }}",
    "{{ messages | attr('__class__') }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ '{0.__class__}'.format_map({'0': 1}) }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['json'] }}",
    "{{ raise_exception.__code__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ self.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ dict.__base__ }}",
    "{{ (messages | map('string')).gi_frame }}",
    "{% set _ = messages.append(1) %}{{ messages | length }}",
    "{% set _ = messages[0].update({'role': 'x'}) %}{{ messages[0].role }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{% extends '/etc/passwd' %}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_no_way_leads_out_of_the_sandbox(template: str) -> None:
    with rendering(template) as chats:
        try:
            text = chats.render(FINE)
        except InvalidArgument:
            return
        # What is not refused is undefined, and prints nothing.
        assert text in ("", "[Undefined]")


def test_the_process_sees_nothing_of_its_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITPOINT_TOKEN", "sp-secret")
    with rendering(WHEN_ASKED.replace("WORST", "")):
        [child] = children()
        assert "SPLITPOINT" not in Path(f"/proc/{child}/environ").read_text()
        limits = Path(f"/proc/{child}/limits").read_text()
        assert "Max file size             0 " in limits
        assert "Max core file size        0 " in limits
        names = {os.readlink(path) for path in Path(f"/proc/{child}/fd").iterdir()}
        assert {name.partition(":")[0] for name in names} <= {"socket", "/dev/null"}
        assert len([name for name in names if name.startswith("socket")]) == 1


def test_a_process_that_is_killed_is_replaced() -> None:
    with rendering(WHEN_ASKED.replace("WORST", "")) as chats:
        for number in (signal.SIGKILL, signal.SIGTERM):
            [child] = children()
            os.kill(child, number)
            wait_for_end(child)
            assert chats.render(FINE) == "ok"


def test_a_process_that_cannot_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with rendering(WHEN_ASKED.replace("WORST", "")) as chats:
        monkeypatch.setattr(renderer, "_MODULE", "splitpoint.nothing")
        with pytest.raises(Unavailable, match="ended: exit code 1") as caught:
            ChatRenderer(ChatTemplates("x"))
        assert caught.value.reason == "CHAT_PROCESS_LOST"
        [child] = children()
        os.kill(child, signal.SIGKILL)
        wait_for_end(child)
        with pytest.raises(Unavailable):
            chats.render(FINE)
        monkeypatch.undo()
        assert chats.render(FINE) == "ok"


def test_a_process_that_is_stopped_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "PATIENCE_SECONDS", 1.0)
    with rendering(WHEN_ASKED.replace("WORST", "")) as chats:
        [child] = children()
        os.kill(child, signal.SIGSTOP)
        with pytest.raises(ResourceExhausted) as caught:
            chats.render(FINE)
        assert caught.value.retry_after_seconds
        monkeypatch.setattr(pool, "PATIENCE_SECONDS", 120.0)
        assert chats.render(FINE) == "ok"


def test_one_slow_chat_does_not_hold_up_another() -> None:
    template = WHEN_ASKED.replace("WORST", LONG_LOOP)
    with rendering(template, most_seconds=LONG_SECONDS) as chats:
        [first] = children()
        slow = threading.Thread(target=lambda: refused(lambda: chats.render(WORST)))
        slow.start()
        while chats._pool.idle_pids:  # until the process is taken
            time.sleep(0.001)
        assert chats.render(FINE) == "ok"
        assert slow.is_alive()
        os.kill(first, signal.SIGPROF)  # as the kernel does when its time is used up
        slow.join()


def test_many_threads_share_few_processes() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with rendering(template, most=2) as chats, ThreadPoolExecutor(16) as threads:
        texts = [f"text {n} " * (n % 97) for n in range(400)]
        found = threads.map(
            lambda text: chats.render(Chat(json.dumps([{"role": "user", "content": text}]))), texts
        )
        assert list(found) == texts
        assert len(children()) <= 2


def test_processes_end_with_their_service(tmp_path: Path) -> None:
    """Also if it is killed while they render."""
    script = tmp_path / "service.py"
    script.write_text(
        "import threading, time\n"
        "from splitpoint.chat.renderer import ChatRenderer\n"
        "from splitpoint.chat.source import ChatTemplates\n"
        "from splitpoint.chat.messages import Chat\n"
        f"chats = ChatRenderer(ChatTemplates({WHEN_ASKED.replace('WORST', LONG_LOOP)!r}))\n"
        f"threading.Thread(target=lambda: chats.render(Chat({WORST.messages!r}))).start()\n"
        "print('starts', flush=True)\n"
        "time.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, env=environment, text=True
    ) as service:
        assert service.stdout is not None
        assert service.stdout.readline() == "starts\n"
        while not (found := children(service.pid)):
            time.sleep(0.01)
        time.sleep(0.3)  # by then it renders
        [child] = found
        service.kill()
    wait_for_end(child)


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(SplitpointError):
        call()
