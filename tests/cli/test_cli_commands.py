"""plan, generate, status and the command itself, as a user runs them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from fake_scheduler import Script, fake_scheduler
from splitpoint_command import splitpoint
from typer.testing import CliRunner

from splitpoint.costs.profile import BUILT_IN_PROFILES
from splitpoint.errors import InvalidArgument
from splitpoint.sampling import FIELDS
from splitpoint.v1 import types_pb2
from splitpoint_cli.main import app
from splitpoint_cli.stack.child import child_environment
from splitpoint_cli.stack.notes import GivenUpWorker, write_given_up

COMMAND = [sys.executable, "-m", "splitpoint_cli"]


@pytest.fixture
def script(socket_address: str) -> Iterator[Script]:
    with fake_scheduler(socket_address) as script:
        yield script


def plan(*arguments: str) -> dict[str, object]:
    """In this process: other tests here start `splitpoint plan`."""
    done = CliRunner().invoke(app, ["plan", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


H100 = ("--profile", "h100", "--cached", "1500", "--new", "100")


def test_plan_answers_zero_for_grouped_queries_and_says_why() -> None:
    answer = plan("--model", "llama-3-8b", *H100)
    assert answer["split_tokens"] == 0
    assert answer["method"] == "load"
    assert answer["rho"] == 2.0
    assert "rho >= 1" in str(answer["reason_details"])


@pytest.mark.parametrize("schedule", ["serial", "column", "row", "pipelined"])
def test_plan_splits_multi_head_models(schedule: str) -> None:
    answer = plan("--model", "opt-6.7b", "--schedule", schedule, *H100)
    assert int(str(answer["split_tokens"])) > 0
    predicted = float(str(answer["predicted_restore_seconds"]))
    assert predicted < float(str(answer["predicted_load_seconds"]))
    assert answer["schedule"] == schedule


def test_plan_of_a_streamed_sequence_with_room_for_its_front() -> None:
    answer = plan(
        *("--model", "llama-3-8b", *H100, "--residency", "streamed"),
        *("--spare", "64MiB", "--step-ms", "4"),
    )
    # 128 KiB of keys and values a token, whole chunks of 64.
    assert answer["resident_tokens"] == 512
    assert float(str(answer["predicted_step_seconds"])) > 0.004
    table = splitpoint(
        *("plan", "--model", "llama-3-8b", *H100, "--residency", "streamed", "--spare", "64MiB")
    )
    assert table.returncode == 0, table.stderr
    assert "K and V of 512 tokens" in table.stdout
    step = next(line for line in table.stdout.splitlines() if "each decode step" in line)
    assert "for this request alone" in step
    assert "own compute not counted" in table.stdout


@pytest.mark.parametrize("option", ["--spare", "--step-ms"])
def test_what_is_said_of_streaming_needs_streaming(option: str) -> None:
    arguments = ["plan", "--model", "opt-6.7b", *H100, option, "64"]
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, InvalidArgument)
    assert done.exception.message.startswith(f"{option} is about a streamed cache")
    assert CliRunner().invoke(app, [*arguments, "--residency", "streamed"]).exit_code == 0


def test_plan_places_weights_in_the_memory_there_is() -> None:
    arguments = ("--model", "opt-30b", "--profile", "a100-80", "--cached", "1500", "--new", "9")
    done = splitpoint("plan", *arguments, "--device-memory", "24GiB", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["host_layers"] == list(range(48))
    assert answer["profile"]["host_weight_bytes"] == answer["streamed_weight_bytes"] > 50 << 30
    step = answer["weight_step"]
    # Nothing is computed here: the link is all there is.
    assert step["fine"] == pytest.approx(step["link"]) == pytest.approx(step["coarse"])
    assert answer["predicted_ttft_seconds"] >= step["link"] * 0.99
    done = splitpoint("plan", *arguments, "--device-memory", "90GiB")
    assert "all 55.8 GiB of weights are on the device" in done.stdout
    done = splitpoint("plan", *arguments, "--device-memory", "2GiB")
    assert done.returncode != 0
    assert "device memory 2 GiB is too small: weights take 2.36 GiB" in done.stderr


def test_plan_for_throughput_spares_the_device() -> None:
    arguments = ("--model", "opt-6.7b", "--profile", "a100-80", "--cached", "800")
    latency = plan(*arguments, "--new", "1000")
    throughput = plan(*arguments, "--new", "1000", "--objective", "throughput")
    assert int(str(latency["split_tokens"])) > 400
    assert throughput["method"] == "load"
    assert throughput["objective"] == "throughput"


def test_plan_reads_folders_and_profile_files(bundled_model: Path, tmp_path: Path) -> None:
    profile = tmp_path / "mine.json"
    profile.write_text(BUILT_IN_PROFILES["a100-80"].to_json())
    arguments = ("--model", str(bundled_model), "--cached", "1000", "--new", "64")
    from_file = plan(*arguments, "--profile", str(profile))
    assert from_file == plan(*arguments, "--profile", "a100-80")
    assert from_file["kv_bytes_per_token"] == 8 * 2 * 256 * 2
    table = splitpoint("plan", *arguments, "--profile", str(profile))
    assert table.returncode == 0
    assert "8 KiB a token" in table.stdout
    wide = plan(*arguments, "--profile", str(profile), "--dtype", "float32")
    assert wide["kv_bytes_per_token"] == 8 * 2 * 256 * 4


def test_plan_without_activations() -> None:
    answer = plan("--model", "opt-6.7b", "--no-activations", *H100)
    assert answer["split_tokens"] == 0
    assert "holds no activations" in str(answer["reason_details"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "no-such-model", *H100), "NOT_FOUND: no-such-model"),
        (("--model", "/no/such", *H100), "INVALID_ARGUMENT: /no/such: no such folder"),
        (("--model", "opt-6.7b", *H100[2:], "--profile", "abacus"), "INVALID_ARGUMENT: profile"),
        (("--model", "opt-6.7b", *H100, "--cached", "4000"), "INVALID_ARGUMENT: 4,228 tokens"),
        (("--model", "opt-6.7b", *H100, "--new", "0"), "INVALID_ARGUMENT: new_tokens"),
        (("--model", "opt-6.7b", *H100, "--schedule", "x"), "INVALID_ARGUMENT: --schedule"),
        (("--model", "opt-6.7b", *H100, "--objective", "x"), "INVALID_ARGUMENT: --objective"),
        (("--model", "opt-6.7b", *H100, "--residency", "x"), "INVALID_ARGUMENT: --residency"),
        (
            ("--model", "opt-6.7b", *H100, "--spare", "x"),
            "INVALID_ARGUMENT: --spare: 'x' is not a size",
        ),
    ],
)
def test_plan_errors_are_one_line(arguments: tuple[str, ...], message: str) -> None:
    done = splitpoint("plan", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"splitpoint: {message}")
    assert done.stderr.count("\n") == 1


def test_generate_json_has_exactly_these_fields(script: Script) -> None:
    done = splitpoint("generate", "abc", "--address", script.address, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "token_ids": [97, 98, 99],
        "text": "abc",
        "finish_reason": "length",
        "matched_stop": None,
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "cached_tokens": 2,
            "speculation": {
                "method": "off",
                "draft_count": 0,
                "draft_token_count": 0,
                "accepted_token_count": 0,
            },
            "selection": {
                "step_count": 0,
                "visible_token_count": 0,
                "read_token_count": 0,
                "fetched_row_count": 0,
                "reused_row_count": 0,
                "link_bytes": 0,
                "off_reason": "",
                "is_approximate": False,
                "read_ratio": 1.0,
                "skipped_token_count": 0,
                "evicted_token_count": 0,
                "pool_bytes": 0,
            },
        },
        "logprobs": None,
        "seed": 7,
        "request_id": script.requests[0].request_id,
        "worker": "0",
        "plan": {
            "residency": "resident",
            "split_tokens": 0,
            "method": "load",
            "schedule": "pipelined",
            "reason": "loaded: because this is a test",
            "reason_details": ["split 0: [nothing] is rebuilt", "resident: it fits"],
            "fetched_tokens": 0,
            "fetch_source": "",
            "fetch_transfer": "",
            "device_tokens": 0,
            "recomputed_tokens": 0,
            "resident_tokens": 0,
            "predicted_restore_seconds": 0.125,
            "predicted_load_seconds": 0.125,
            "predicted_recompute_seconds": 0.0,
            "predicted_step_seconds": 0.0,
        },
        "restore_seconds": 0.0625,
        "step_seconds": None,
        "ttft_seconds": 0.25,
        "seconds": 0.5,
    }


def test_generate_explains_itself_on_stderr_when_asked(script: Script) -> None:
    done = splitpoint("generate", "abc", "--address", script.address, "--explain")
    assert (done.returncode, done.stdout) == (0, "abc\n")
    summary, why, *details = done.stderr.splitlines()
    assert "2 of 3 prompt tokens cached" in summary
    assert "restored in 62.5 ms (load, 125 ms predicted), worker 0" in summary
    assert why == "why: loaded: because this is a test"
    assert details == ["  split 0: [nothing] is rebuilt", "  resident: it fits"]
    piped = splitpoint("generate", "abc", "--address", script.address, "--explain", "--json")
    assert json.loads(piped.stdout)["plan"]["reason"] in piped.stderr
    assert splitpoint("generate", "abc", "--address", script.address).stderr == ""
    script.step_seconds = 0.03
    streamed = splitpoint("generate", "abc", "--address", script.address, "--explain", "--json")
    assert json.loads(streamed.stdout)["step_seconds"] == 0.03
    assert "30 ms a step (" in streamed.stderr


def test_generate_asks_for_drafts(script: Script) -> None:
    options = ("--speculate", "suffix", "--speculative-tokens", "0", "--prompt-lookup-min", "3")
    assert splitpoint("generate", "abc", "--address", script.address, *options).returncode == 0
    assert script.requests[-1].speculation == types_pb2.SpeculativeParams(
        method=types_pb2.DRAFT_METHOD_SUFFIX, num_speculative_tokens=0, prompt_lookup_min=3
    )
    for theirs, ours in (
        ("ngram", types_pb2.DRAFT_METHOD_SUFFIX),
        ("draft_model", types_pb2.DRAFT_METHOD_MODEL),
    ):
        done = splitpoint("generate", "abc", "--address", script.address, "--speculate", theirs)
        assert done.returncode == 0, done.stderr
        assert script.requests[-1].speculation == types_pb2.SpeculativeParams(method=ours)
    wrong = splitpoint("generate", "abc", "--address", script.address, "--speculate", "eagle")
    assert wrong.returncode == 2
    assert "'eagle' is not one of" in wrong.stderr


def test_generate_asks_for_a_selection_and_says_what_it_came_to(script: Script) -> None:
    asked = ("generate", "abc", "--address", script.address, "--select", "columns:0.1")
    script.selection = types_pb2.SelectionUsage(
        step_count=2,
        visible_token_count=2000,
        read_token_count=200,
        fetched_row_count=300,
        reused_row_count=100,
        link_bytes=300 * 1024,
        is_approximate=True,
    )
    done = splitpoint(*asked)
    assert (
        done.stderr == "approximate: 2 steps read 10.0% of the tokens, 100 each, and skipped 900\n"
    )
    sent = script.requests[-1].selection
    assert (sent.method, sent.ratio) == (types_pb2.SELECTION_METHOD_COLUMNS, 0.1)
    assert not sent.verify
    explained = splitpoint(*asked, "--explain", "--json")
    assert "10.0% of the tokens read (300 of 400 rows fetched, 300 KiB)" in explained.stderr
    usage = json.loads(explained.stdout)["usage"]["selection"]
    assert (usage["is_approximate"], usage["read_ratio"]) == (True, 0.1)
    assert usage["skipped_token_count"] == 1800
    script.selection = types_pb2.SelectionUsage(off_reason="the cache is on the device")
    unused = splitpoint(*asked, "--verify")
    assert unused.stderr == "the selection was not used: the cache is on the device\n"
    assert script.requests[-1].selection.verify


def test_generate_refuses_selections_that_cannot_be(script: Script) -> None:
    for options, said in (
        (("--verify",), "--verify needs --select"),
        (("--select", "best:0.1"), "'best' is not one of"),
        (("--select", "columns:2"), "ratio must be in (0, 1]"),
    ):
        done = splitpoint("generate", "abc", "--address", script.address, *options)
        assert done.returncode == 2, done.stderr
        assert said in done.stderr
    assert script.requests == []


def test_generate_asks_for_a_way_to_restore(script: Script) -> None:
    done = splitpoint("generate", "a", "--address", script.address, "--restore", "tokens")
    assert done.returncode == 0, done.stderr
    assert script.requests[0].restore_method == types_pb2.RESTORE_METHOD_TOKENS
    assert not script.requests[0].HasField("split_tokens")


def test_generate_shows_logprobs(script: Script) -> None:
    arguments = ("generate", "ab", "--address", script.address, "--logprobs", "2")
    done = splitpoint(*arguments)
    assert done.returncode == 0, done.stderr
    text, header, *rows = done.stdout.splitlines()
    assert (text, header.split()[:3]) == ("ab", ["index", "token", "logprob"])
    assert [row.split() for row in rows] == [
        ["0", "97", "'a'", "-0.5000", "97", "'a'", "-0.5000,", "98", "'b'", "-1.5000"],
        ["1", "98", "'b'", "-0.5000", "98", "'b'", "-0.5000,", "99", "'c'", "-1.5000"],
    ]
    assert json.loads(splitpoint(*arguments, "--json").stdout)["logprobs"][1] == {
        "token_id": 98,
        "logprob": -0.5,
        "bytes": [98],
        "top": [
            {"token_id": 98, "logprob": -0.5, "bytes": [98]},
            {"token_id": 99, "logprob": -1.5, "bytes": [99]},
        ],
    }


def test_generate_refuses_what_is_not_text_or_too_long(script: Script) -> None:
    def refused(code: int, stdin: bytes, *arguments: bytes | str) -> str:
        done = subprocess.run(
            [*COMMAND, "generate", "--address", script.address, *arguments],
            input=stdin,
            capture_output=True,
            timeout=60,
            env=child_environment({}),
            check=False,
        )
        assert (done.returncode, done.stdout) == (code, b"")
        assert done.stderr.count(b"\n") == 1
        return done.stderr.decode()

    said = refused(2, b"abc\xff")
    assert said.startswith("splitpoint: INVALID_ARGUMENT: the prompt on stdin is not UTF-8 text")
    assert "INVALID_ARGUMENT: prompt is not valid UTF-8" in refused(2, b"", b"abc\xff")
    said = refused(5, b"x" * (32 << 20))
    assert said.startswith("splitpoint: RESOURCE_EXHAUSTED: the request has 32 MiB, and at most 4")
    assert script.requests == []
    script.endless = True
    # A timeout's words are ours.
    done = splitpoint("generate", "a", "--address", script.address, "--timeout", "0.2", "--json")
    assert done.returncode == 4
    assert done.stderr == (
        "splitpoint: DEADLINE_EXCEEDED: the generation did not end within 0.2 s\n"
    )


def test_generate_streams_text_and_reads_stdin(script: Script) -> None:
    script.tail = "?"
    done = splitpoint("generate", "--address", script.address, stdin="grüße"[:2])
    assert (done.returncode, done.stdout) == (0, "gr?\n")


def test_generate_passes_every_option_on(script: Script) -> None:
    done = splitpoint(
        *("generate", "--address", script.address, "--prompt-ids", "5,6", "--max-tokens", "9"),
        *("--temperature", "0.5", "--seed", "3", "--ignore-eos", "--stop", "a", "--stop", "b"),
        *("--worker", "1", "--split", "64", "--cache-salt", "s", "--residency", "streamed"),
        *("--top-k", "3", "--top-p", "0.9", "--min-p", "0.1", "--presence-penalty", "-1"),
        *("--frequency-penalty", "0.25", "--repetition-penalty", "1.5", "--min-tokens", "2"),
        *("--stop-token-id", "8", "--stop-token-id", "9", "--logprobs", "0"),
        *("--logit-bias", "4=-100", "--logit-bias", "5=0.5", "--request-id", "mine"),
        *("--priority", "-3", "--keep-special-tokens", "--include-stop"),
        *("--allowed-token-id", "4", "--allowed-token-id", "7", "--bad-word", "no"),
    )
    assert done.returncode == 0, done.stderr
    request = script.requests[0]
    assert list(request.token_ids.ids) == [5, 6]
    assert request.sampling.max_tokens == 9
    assert request.sampling.temperature == 0.5
    assert request.sampling.seed == 3
    assert request.sampling.ignore_eos
    assert list(request.sampling.stop) == ["a", "b"]
    assert (request.worker_id, request.split_tokens, request.cache_salt) == ("1", 64, b"s")
    assert request.residency == 2
    assert request.request_id == "mine"
    assert request.priority == -3
    assert request.sampling == types_pb2.SamplingParams(
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        seed=3,
        presence_penalty=-1,
        frequency_penalty=0.25,
        repetition_penalty=1.5,
        logit_bias={4: -100, 5: 0.5},
        stop=["a", "b"],
        stop_token_ids=[8, 9],
        max_tokens=9,
        min_tokens=2,
        ignore_eos=True,
        logprobs=0,
        keeps_special_tokens=True,
        include_stop_str_in_output=True,
        allowed_token_ids=[4, 7],
        bad_words=["no"],
    )
    others = {"structured_output", "returns_hidden_state"}
    assert others | FIELDS.keys() == {
        field.name for field in types_pb2.SamplingParams.DESCRIPTOR.fields
    }
    # No more than two tokens of the fake's prompt are cached.
    assert done.stderr == (
        "--split 64 was capped at 0: 2 tokens of the prompt are cached, and nothing else can "
        "be rebuilt\n"
    )


def test_generate_until_the_context_is_full(script: Script) -> None:
    done = splitpoint("generate", "x", "--fill-context", "--address", script.address)
    assert done.returncode == 0, done.stderr
    sampling = script.requests[0].sampling
    assert sampling.fills_context
    assert not sampling.HasField("max_tokens")


def test_generate_passes_on_what_the_answer_must_look_like(script: Script, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "answer.lark"
    schema.write_text('{"type": "integer"}')
    grammar.write_text('start: "ä"')
    wanted = types_pb2.StructuredOutput
    for arguments, structure in (
        (("--json-object",), wanted(json_object=True)),
        (("--json-schema", str(schema)), wanted(json_schema=schema.read_text())),
        (("--regex", "a+"), wanted(regex="a+")),
        (("--grammar", str(grammar)), wanted(grammar='start: "ä"')),
        (
            ("--choice", "yes", "--choice", "no"),
            wanted(choice=types_pb2.Choices(texts=["yes", "no"])),
        ),
    ):
        done = splitpoint("generate", "x", "--address", script.address, *arguments)
        assert done.returncode == 0, done.stderr
        assert script.requests[-1].sampling.structured_output == structure


@pytest.mark.parametrize(
    "arguments",
    [
        ("x", "--json-object", "--regex", "a"),
        ("x", "--json-schema", "/nowhere.json"),
        ("x", "--prompt-ids", "1"),
        ("--prompt-ids", "1,x"),
        ("x", "--split", "-1"),
        ("x", "--split", "many"),
        ("x", "--logit-bias", "5"),
        ("x", "--logit-bias", "a=1"),
        ("x", "--timeout", "0"),
        ("x", "--address", "nowhere"),
        ("",),
    ],
)
def test_generate_refuses_nonsense(script: Script, arguments: tuple[str, ...]) -> None:
    address = () if "--address" in arguments else ("--address", script.address)
    done = splitpoint("generate", *arguments, *address)
    assert done.returncode == 2
    assert done.stderr.startswith("splitpoint: INVALID_ARGUMENT: ")
    assert done.stderr.count("\n") == 1


def test_ctrl_c_cancels_a_generation(script: Script) -> None:
    script.endless = True
    with subprocess.Popen(
        [*COMMAND, "generate", "abc", "--address", script.address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment({}),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(5) == "abcab"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors == "splitpoint: CANCELLED: interrupted\n"
    assert script.cancelled.wait(30)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:1"])
def test_no_scheduler_is_exit_3(address: str) -> None:
    for command in (("generate", "x"), ("status",)):
        done = splitpoint(*command, "--address", address)
        assert done.returncode == 3
        assert f"no scheduler answers at {address}, is `splitpoint up` running?" in done.stderr
        assert "(Connection refused" in done.stderr
        assert done.stderr.count("\n") == 1


def test_status(script: Script) -> None:
    done = splitpoint("status", "--address", script.address)
    assert done.returncode == 0, done.stderr
    assert "queue: 1 request waits, at most 8 may\n" in done.stdout
    assert " of device memory) has waited 1.5 s: " in done.stdout
    assert "memory is full" in done.stdout
    assert "pipelined" in done.stdout
    assert "worker 0 EMULATES a link of 184 MB/s" in done.stdout
    assert "worker 1 EMULATES" not in done.stdout
    assert "worker 0: [3 of 4] layers on the host\n" in done.stdout
    numerics = "worker 0: numerics invariant 00c0ffee: no operator [of 21] depends on what is"
    assert numerics in done.stdout
    assert "worker 1:" not in done.stdout
    eager = "worker 0: decoding steps are no CUDA graphs: a recording failed [see the log]\n"
    assert eager not in done.stdout
    assert eager in splitpoint("status", "--address", script.address, "--wide").stdout
    assert "warning: worker 1 was lost 2 times, last 8 s ago, and is back" in done.stdout
    assert done.stdout.startswith(f"scheduler {script.address}: ready, serves tiny\n")
    assert "more, which" not in done.stdout
    script.waiting_count = 256
    done = splitpoint("status", "--address", script.address)
    assert done.stdout.count(" has waited ") == 10
    assert "  and 246 more, which --json lists\n" in done.stdout
    script.workers_ready = False
    done = splitpoint("status", "--address", script.address, "--json")
    assert done.returncode == 0, "one worker of two serves"
    answer = json.loads(done.stdout)
    assert (answer["serves"], answer["complete"]) == (True, False)
    assert answer["workers"][1]["message"] == "loading"
    assert [worker["schedule"] for worker in answer["workers"]] == ["pipelined", "serial"]
    rates = [worker["emulated_link_bytes_per_second"] for worker in answer["workers"]]
    assert rates == [184e6, None]
    assert answer["queue"]["requests"][0]["waited_seconds"] == 1.5
    assert answer["scheduler"]["completed_count"] == 5
    telemetry = answer["workers"][0]["telemetry"]
    assert telemetry["link_in_bytes"] == 1 << 20
    assert telemetry["eager_message"] == "a recording failed [see the log]"
    worst = answer["findings"][0]
    assert set(worst) == {"severity", "what", "why", "do"}
    assert worst["severity"] == "error"
    assert worst["what"] == "worker 1 was lost 8 s ago and is not back"


def test_status_of_a_stack_that_serves_without_one_worker(script: Script) -> None:
    script.workers_ready = False
    done = splitpoint("status", "--address", script.address)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"scheduler {script.address}: serves tiny with 1 of 2 workers\n")
    waited = splitpoint("status", "--address", script.address, "--wait", "0.1")
    assert waited.returncode == 4, "complete was asked for"


def test_status_of_a_worker_that_up_gave_up(script: Script, tmp_path: Path) -> None:
    script.workers_ready = False
    script.lost_address = f"unix:{tmp_path}/worker-1.sock"
    other = GivenUpWorker(f"unix:{tmp_path}/worker-7.sock", "another", 1.0)
    write_given_up(tmp_path, [GivenUpWorker(script.lost_address, "5 deaths", 250.0), other])
    done = splitpoint("status", "--address", script.address, "--json", "--wait", "0.1")
    assert done.returncode == 6
    worst = json.loads(done.stdout)["findings"][0]
    assert worst["what"] == "worker 1 was given up; the other workers serve"
    assert worst["why"] == "5 deaths"
    assert "again in 4 min" in worst["do"]
    script.workers_ready = True
    assert splitpoint("status", "--address", script.address).returncode == 0, "it is back"
    write_given_up(tmp_path, [])
    assert not list(tmp_path.glob("given-up*"))


def test_an_error_of_a_commands_import_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a KeyError, by which a mapping says that it lacks something."""

    def load(name: str) -> None:
        raise KeyError(f"in the import of {name}")

    monkeypatch.setattr("splitpoint_cli.main._load", load)
    # A group of its own: another one may have loaded the command.
    group = typer.main.get_command(app)
    with pytest.raises(KeyError, match="in the import of top"):
        group.main(["top"], standalone_mode=False)
    with pytest.raises(Exception, match="No such command 'tap'"):
        group.main(["tap"], standalone_mode=False)


def test_version_and_help_are_quick_and_torchless() -> None:
    assert splitpoint("--version").stdout.startswith("splitpoint ")
    code = (
        "import importlib, sys\n"
        "from splitpoint_cli.main import COMMANDS\n"
        "for place in COMMANDS.values():\n"
        "    importlib.import_module(place.partition(':')[0])\n"
        "assert not {'torch', 'numpy', 'redis'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=child_environment({}), timeout=60)
    for command in ("up", "generate", "plan", "status", "bench"):
        assert splitpoint(command, "--help").returncode == 0
    assert "130 interrupted" in splitpoint("generate", "--help").stdout.replace("\n", " ")
