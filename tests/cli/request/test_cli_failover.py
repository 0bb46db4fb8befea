"""Clients with several schedulers: they go on elsewhere, and each token comes once."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from fake_scheduler import Script, fake_scheduler
from typer.testing import CliRunner

from splitpoint import errors
from splitpoint.client import AsyncClient, Client
from splitpoint.client.answers import Completion, Tokens
from splitpoint.client.requests import generate_request
from splitpoint.client.scheduler_attempts import pause_after
from splitpoint.transport.limits import MESSAGE_LIMIT_BYTES
from splitpoint_cli.main import app
from splitpoint_cli.request.findings import findings_of
from splitpoint_cli.request.observed import read_status

NOWHERE = "127.0.0.1:1"


@pytest.fixture
def scripts() -> Iterator[list[Script]]:
    """Two schedulers."""
    with ExitStack() as running:
        yield [running.enter_context(fake_scheduler("127.0.0.1:0")) for _ in range(2)]


def both(scripts: list[Script]) -> list[str]:
    return [script.address for script in scripts]


def fail(script: Script, after: int, count: int = 1) -> None:
    script.fail_after, script.fail_count = after, count


def test_a_generation_goes_on_at_the_next_address(scripts: list[Script]) -> None:
    fail(scripts[0], after=2)
    told: list[tuple[str, str]] = []
    with Client(
        both(scripts), on_retry=lambda error, at: told.append((error.message, at))
    ) as client:
        events = list(client.generate("abcd", logprobs=0))
        assert client.address == scripts[1].address  # later calls begin there
        assert client.tokenize("ab").tokens == ("a", "b")
    tokens = [event for event in events if isinstance(event, Tokens)]
    assert [(event.index, event.token_ids) for event in tokens] == [
        (index, (97 + index,)) for index in range(4)
    ]
    whole = events[-1]
    assert isinstance(whole, Completion)
    assert (whole.text, len(whole.logprobs)) == ("abcd", 4)
    first, again = scripts[0].requests[0], scripts[1].requests[0]
    assert not first.HasField("resume")
    assert (again.resume.next_index, list(again.resume.token_ids)) == (2, [97, 98])
    again.ClearField("resume")
    assert again == first  # the same id and body
    assert told == [("the worker is gone", scripts[1].address)]


async def test_the_asyncio_client_goes_on_too(scripts: list[Script]) -> None:
    fail(scripts[0], after=3)
    fail(scripts[1], after=3, count=0)
    async with AsyncClient(",".join(both(scripts))) as client:
        events = [event async for event in client.generate("abcd")]
        assert (await client.get_model()).name == "tiny"
    assert [event.index for event in events if isinstance(event, Tokens)] == [0, 1, 2, 3]
    assert scripts[1].requests[0].resume.next_index == 3


def test_a_scheduler_that_is_away_is_passed_over(scripts: list[Script]) -> None:
    with Client([NOWHERE, scripts[0].address]) as client:
        assert client.generate("abc").complete().text == "abc"
    with Client([NOWHERE, scripts[0].address]) as client:
        assert client.get_model().name == "tiny"
        client.wait_ready(60)
        assert client.address == scripts[0].address
    refusing, _ = scripts
    refusing.failures = [errors.Unavailable("draining", reason="DRAINING", retry_after_seconds=60)]
    with Client(both(scripts), timeout=50) as client:  # its hint to wait does not hold us up
        assert client.generate("abc").complete().text == "abc"


def test_status_says_which_scheduler_answered(scripts: list[Script]) -> None:
    addresses = [NOWHERE, *both(scripts)]
    with Client(addresses) as client:
        found = read_status(client)
        assert found.address == scripts[0].address
        assert list(found.away) == [NOWHERE]
        [finding] = [each for each in findings_of(found) if NOWHERE in each.what]
        assert scripts[0].address in finding.what
        assert "refused" in finding.why
    with Client(both(scripts)) as client:
        assert read_status(client).away == {}
    told = CliRunner().invoke(app, ["status", "--address", ",".join(addresses)])
    assert f"scheduler {scripts[0].address}: " in told.output
    assert f"the scheduler {NOWHERE} did not answer" in " ".join(told.output.split())
    told = CliRunner().invoke(app, ["status", "--json", "--address", ",".join(addresses)])
    assert list(json.loads(told.stdout)["away"]) == [NOWHERE]


def test_a_scheduler_that_comes_back_is_not_away(scripts: list[Script]) -> None:
    with Client(both(scripts)) as client:
        client._schedulers.away = {scripts[0].address: "gone"}
        client.list_workers()
        assert client.away == {}
        # Nor if the other one answers all calls from then on.
        client._schedulers.away = {scripts[1].address: "gone", NOWHERE: "gone"}
        found = read_status(client)
        assert found.address == scripts[0].address
        assert list(found.away) == [NOWHERE]
        assert "refused" in found.away[NOWHERE]


def test_one_address_goes_on_from_its_last_token(scripts: list[Script]) -> None:
    fail(scripts[0], after=1)
    with Client(scripts[0].address) as client:
        assert client.generate("abc").complete().text == "abc"
    assert [each.resume.next_index for each in scripts[0].requests] == [0, 1]


def test_the_time_to_go_on_is_bounded(scripts: list[Script]) -> None:
    for script in scripts:
        fail(script, after=1, count=1_000_000)
    many = pytest.raises(errors.Unavailable, match=r"2 schedulers were tried for 2 s: the work")
    with Client(both(scripts), retry_seconds=2) as client, many:
        client.generate("abc").complete()
    assert all(len(script.requests) > 1 for script in scripts)
    asked = len(scripts[1].requests)
    once = pytest.raises(errors.Unavailable, match=r"^the worker is gone")
    with Client(both(scripts), retry_seconds=0) as client, once:
        client.generate("abc").complete()
    assert len(scripts[1].requests) == asked
    away = Client([NOWHERE, scripts[0].address], retry_seconds=0)
    with away as client, pytest.raises(errors.Unavailable):
        client.get_model()


def test_the_deadline_holds_over_all_tries(scripts: list[Script]) -> None:
    for script in scripts:
        fail(script, after=1, count=1_000_000)
    late = pytest.raises(errors.DeadlineExceeded, match=r"did not end within 0\.7 s")
    with Client(both(scripts), retry_seconds=60) as client, late:
        client.generate("abc", timeout=0.7).complete()


@pytest.mark.parametrize(
    "error",
    [
        errors.ResourceExhausted("full", retry_after_seconds=0.01),
        errors.FailedPrecondition("no"),
        errors.Internal("a bug"),
        errors.Unavailable("it was moved too often", reason="TOO_MANY_MOVES"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_another_scheduler_would_repeat_is_final(
    scripts: list[Script], error: errors.SplitpointError
) -> None:
    scripts[0].failures = [error]
    with Client(both(scripts)) as client, pytest.raises(type(error)):
        client.generate("abc").complete()
    assert not scripts[1].requests


# What all others answer when a scheduler dies and its streams arrive there at once.
FULL = errors.ResourceExhausted("the queue is full", reason="QUEUE_FULL", retry_after_seconds=0.01)


def test_a_scheduler_that_is_full_is_asked_again(scripts: list[Script]) -> None:
    fail(scripts[0], after=2, count=3)
    scripts[1].failures = [FULL, FULL]
    told: list[str] = []
    with Client(both(scripts), on_retry=lambda error, _: told.append(error.reason)) as client:
        assert client.generate("abcd").complete().text == "abcd"
    assert told == ["UNAVAILABLE", "QUEUE_FULL"] * 2 + ["UNAVAILABLE"]
    assert [each.resume.next_index for each in scripts[1].requests] == [2, 2, 2]
    scripts[0].failures = [FULL]
    with Client([NOWHERE, scripts[0].address]) as client:  # lost before the first token
        assert client.generate("abc").complete().text == "abc"


def test_schedulers_that_stay_full_are_given_up(scripts: list[Script]) -> None:
    fail(scripts[0], after=2, count=1_000_000)
    scripts[1].failures = [FULL] * 1000
    with Client(both(scripts), retry_seconds=0.5) as client:
        with pytest.raises(errors.Retryable, match=r"2 schedulers were tried for 0\.5 s"):
            client.generate("abcd").complete()
        scripts[0].failures = [FULL] * 1000
        with pytest.raises(errors.ResourceExhausted, match=r"^the queue is full") as refused:
            client.generate("abcd").complete()  # never taken: its caller decides
    assert refused.value.retry_after_seconds == 0.01


@pytest.mark.parametrize("reason", ["NEVER_FITS", "MESSAGE_TOO_LARGE"])
def test_what_never_fits_ends_a_stream(scripts: list[Script], reason: str) -> None:
    fail(scripts[0], after=2)
    scripts[1].failures = [errors.ResourceExhausted("it is too large", reason=reason)]
    never = pytest.raises(errors.ResourceExhausted, match=r"^it is too large")
    with Client(both(scripts)) as client, never:
        client.generate("abcd").complete()
    assert len(scripts[0].requests) == 1


def test_pauses_grow_up_to_a_second() -> None:
    assert 0.05 <= pause_after(1) <= 0.1 < 0.2 <= pause_after(3) <= 0.4
    assert 0.5 <= pause_after(5_000) <= 1
    assert 0.3 <= pause_after(1, 0.6) <= 0.6
    assert pause_after(1, 60) <= 1


def test_a_whole_answer_needs_no_end_of_its_call(scripts: list[Script]) -> None:
    fail(scripts[0], after=3)
    scripts[0].tail = "!"
    with Client(both(scripts)) as client:
        assert client.generate("abc").complete().text == "abc!"
    assert not scripts[1].requests


def test_tokens_that_no_message_holds_are_not_sent(scripts: list[Script]) -> None:
    fail(scripts[0], after=1)
    # The request is as large as a message may be, and its resume is larger.
    ids = [1] * 1_000_000
    spare = MESSAGE_LIMIT_BYTES - generate_request(ids, {"request_id": "r"}).ByteSize() - 6
    salt = "s" * spare
    gone = pytest.raises(errors.Unavailable, match="worker is gone")
    with Client(both(scripts)) as client, gone:
        client.generate(ids, request_id="r", cache_salt=salt).complete()
    assert not scripts[1].requests


def test_closing_ends_the_tries(scripts: list[Script]) -> None:
    for script in scripts:
        fail(script, after=1, count=1_000_000)
    waits = threading.Event()
    with Client(both(scripts), retry_seconds=60, on_retry=lambda *_: waits.set()) as client:
        generation = client.generate("abc")

        def close() -> None:
            waits.wait(30)
            generation.close()

        closer = threading.Thread(target=close)
        closer.start()
        with pytest.raises((errors.Cancelled, errors.Unavailable)):
            generation.complete()
        closer.join()


SILENT = """
import signal, sys, time
from fake_scheduler import fake_scheduler

with fake_scheduler("127.0.0.1:0") as script:
    script.silent = True
    print(script.address, flush=True)
    while len(script.requests) < int(sys.argv[1]):
        time.sleep(0.01)
    print("all are here", flush=True)
    signal.pause()
"""


@contextmanager
def silent_scheduler(call_count: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """A process that answers nothing: its address, and a function that kills it.

    It is killed once this number of calls has come.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", SILENT, str(call_count)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None

    def kill() -> None:
        assert process.stdout is not None
        assert process.stdout.readline() == "all are here\n"
        process.kill()
        process.wait()

    try:
        yield process.stdout.readline().strip(), kill
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_no_call_outlives_a_scheduler_that_is_killed_and_stays_away() -> None:
    timeouts = [None, 60, None, 60, None, 60]
    with silent_scheduler(2 * len(timeouts)) as (address, kill):
        client, ended = Client(address), threading.Semaphore(0)
        failures: list[type[BaseException]] = []

        def wait_for(timeout: float | None) -> None:
            with pytest.raises(errors.Unavailable) as caught:
                client.generate("abc", timeout=timeout).complete()
            failures.append(caught.type)
            ended.release()

        async def wait_for_all() -> None:
            async with AsyncClient(address) as other:
                calls = [other.generate("abc", timeout=each).complete() for each in timeouts]
                answers = await asyncio.gather(*calls, return_exceptions=True)
            failures.extend(map(type, answers))
            ended.release()

        threading.Thread(target=asyncio.run, args=(wait_for_all(),), daemon=True).start()
        for timeout in timeouts:
            threading.Thread(target=wait_for, args=(timeout,), daemon=True).start()
        kill()
        for _ in range(len(timeouts) + 1):
            assert ended.acquire(timeout=30), "a call hangs"
        client.close()
    assert failures == [errors.Unavailable] * (2 * len(timeouts))


def test_a_single_address_is_asked_again_only_where_that_may_help(scripts: list[Script]) -> None:
    script = scripts[0]

    def asked(error: errors.SplitpointError, retry_seconds: float = 10) -> int:
        script.requests.clear()
        script.failures = [error] * 10
        refused = pytest.raises(type(error))
        with Client(script.address, retry_seconds=retry_seconds) as client, refused:
            client.generate("abc").complete()
        return len(script.requests)

    assert asked(errors.Unavailable("not yet", reason="NO_WORKER", retry_after_seconds=0.01)) == 3
    assert asked(errors.Unavailable("it ended", reason="CHAT_PROCESS_LOST")) == 1
    assert asked(errors.Unavailable("gone"), retry_seconds=0) == 1


def test_generate_says_that_it_goes_on(scripts: list[Script]) -> None:
    fail(scripts[0], after=2)
    done = CliRunner().invoke(app, ["generate", "abcd", "--address", ",".join(both(scripts))])
    assert (done.exit_code, done.stdout) == (0, "abcd\n")
    assert "the worker is gone" in done.stderr
    assert scripts[1].address in " ".join(done.stderr.split())
    fail(scripts[1], after=2)
    address = ",".join(reversed(both(scripts)))
    failed = CliRunner().invoke(
        app, ["generate", "abcd", "--address", address, "--retry-seconds", "0"]
    )
    assert isinstance(failed.exception, errors.Unavailable)
    fail(scripts[0], after=2, count=2)
    scripts[1].failures = [FULL]
    done = CliRunner().invoke(app, ["generate", "abcd", "--address", ",".join(both(scripts))])
    assert (done.exit_code, done.stdout) == (0, "abcd\n")
    assert "is full (the queue is full)" in " ".join(done.stderr.split())


@pytest.mark.parametrize("address", ["", "a,", "127.0.0.1:1,nonsense", ","])
def test_a_bad_list_of_addresses_is_refused(address: str) -> None:
    if address:
        with pytest.raises(errors.InvalidArgument):
            Client(address)
    else:
        with pytest.raises(errors.InvalidArgument):
            Client(["", ""])
