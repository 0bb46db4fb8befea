"""Made traces have the published statistics; files are read as written, or name the wrong line."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from splitpoint.errors import InvalidArgument
from splitpoint_cli.traces.arrival import Arrival, Trace, limited, scaled
from splitpoint_cli.traces.formats import load_trace, read_trace
from splitpoint_cli.traces.generators import CONVERSATION, PUBLISHED, SYNTHETIC, generate
from splitpoint_cli.traces.statistics import describe, quantile, seen_share

# (requests, requests/s, gap CV, input mean p50 p90 p99, output mean p50 p90, share of blocks seen)
PAPERS = {
    CONVERSATION: (
        *(12_031, 3.40, 1.0),
        *((12_035, 6_909, 27_367, 85_401), (343, 350, 597), 0.37),
    ),
    SYNTHETIC: (
        *(3_993, 3.91, 1.0),
        *((15_325, 11_587, 38_615, None), (149, 69, None), 0.64),
    ),
    "azure-code": (8_819, 2.57, 13.2, (2_048, 1_469, 5_194, 7_436), (28, 13, 55), None),
    "azure-conversation": (
        *(19_366, 5.53, 1.09),
        *((1_155, 1_020, 2_735, 4_142), (211, 129, 424), None),
    ),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", PAPERS)
def test_made_traces_have_the_published_statistics(name: str, seed: int) -> None:
    count, rate, cv, inputs, outputs, seen = PAPERS[name]
    trace = generate(name, seed=seed)
    found, arrivals = describe(trace), trace.arrivals
    assert found.count == count
    assert found.request_rate == pytest.approx(rate, rel=0.01)
    gaps = [later.seconds - earlier.seconds for earlier, later in pairwise(arrivals)]
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(cv, rel=0.1)
    for expected, mean, lengths in (
        (inputs, found.mean_input, sorted(each.input_length for each in arrivals)),
        (outputs, found.mean_output, sorted(each.output_length for each in arrivals)),
    ):
        measured = (mean, *(quantile(lengths, share) for share in (0.5, 0.9, 0.99)))
        for wanted, value in zip(expected, measured, strict=False):
            assert wanted is None or value == pytest.approx(wanted, rel=0.02)
    assert found.seen_share == pytest.approx(seen or 0.0, abs=0.01)


def test_a_seed_gives_one_trace_and_another_seed_another() -> None:
    made = generate(SYNTHETIC, seed=3, count=500)
    assert made == generate(SYNTHETIC, seed=3, count=500)
    assert made != generate(SYNTHETIC, seed=4, count=500)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_small_trace_has_the_lengths_too(name: str) -> None:
    published, found = PAPERS[name], describe(generate(name, count=200))
    assert found.mean_input == pytest.approx(published[3][0], rel=0.1)
    assert found.request_rate == pytest.approx(published[1], rel=0.05)


def test_blocks_are_those_of_the_prompt_and_a_conversation_has_one_tenant() -> None:
    trace = generate(CONVERSATION, count=2_000, tenants=3)
    owner: dict[int, str] = {}
    for each in trace.arrivals:
        assert len(each.hash_ids) == -(-each.input_length // 512)
        assert {owner.setdefault(block, each.tenant) for block in each.hash_ids} == {each.tenant}
    assert {each.tenant for each in trace.arrivals} == {"tenant-0", "tenant-1", "tenant-2"}


@pytest.mark.parametrize("length", [1 / 32, 1 / 500, 2.0])
def test_a_scaled_trace_shares_the_same_blocks(length: float) -> None:
    trace = generate(SYNTHETIC, count=300)
    small = scaled(trace, rate=4, length=length, output=0.1)
    assert small.seconds == pytest.approx(trace.seconds / 4)
    assert seen_share(small.arrivals) == seen_share(trace.arrivals)
    for each in small.arrivals:
        assert each.output_length >= 1
        assert len(each.hash_ids) == -(-each.input_length // small.block_tokens)


def test_a_limited_trace_ends_early() -> None:
    trace = generate("azure-code", count=100)
    assert limited(trace, count=7).arrivals == trace.arrivals[:7]
    half = limited(trace, seconds=trace.seconds / 2)
    assert 0 < len(half.arrivals) < 100
    assert half.seconds <= trace.seconds / 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "trace.jsonl",
            '{"timestamp": 1500, "input_length": 600, "output_length": 3, "hash_ids": [7, 8], '
            '"tenant": "a \\"b\\", c", "priority": -2}\n'
            '{"timestamp": 20, "input_length": 5, "output_length": 1}\n',
        ),
        (
            "trace.csv",
            "seconds,input_length,output_length,tenant,priority,hash_ids\n"
            '1.5,600,3,"a ""b"", c",-2,7 8\n'
            "0.02,5,1,,0,\n",
        ),
    ],
)
def test_both_formats_are_read_in_order_of_arrival(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    arrivals = (Arrival(0.02, 5, 1), Arrival(1.5, 600, 3, (7, 8), 'a "b", c', -2))
    assert read_trace(path) == Trace("trace", arrivals)
    assert load_trace(str(path), count=1).arrivals == arrivals[:1]


def test_azures_columns_are_read(tmp_path: Path) -> None:
    path = tmp_path / "AzureLLMInferenceTrace_code.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:04.0319600,110,27\n"
    )
    first, second = read_trace(path).arrivals
    assert first == Arrival(0.0, 4808, 10)
    assert second.seconds == pytest.approx(0.052)


GOOD = '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}\n'
HEAD = "seconds,input_length,output_length,hash_ids\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", GOOD + "{", "line 2: not JSON"),
        ("a.jsonl", GOOD + "\n[1]", "line 3: not a JSON object"),
        ("a.jsonl", '{"timestamp": 0, "input_length": 1}', "line 1: 'output_length' is missing"),
        ("a.jsonl", GOOD.replace("600", "0"), "line 1: input_length is a whole number"),
        ("a.jsonl", GOOD.replace("600", "true"), "line 1: input_length is a whole number"),
        (
            "a.jsonl",
            GOOD.replace("600", "512"),
            "line 1: 2 hash_ids are more than the blocks of 512 in 512 tokens",
        ),
        ("a.jsonl", GOOD.replace("[1, 2]", '"x"'), "line 1: hash_ids is a list"),
        ("a.jsonl", GOOD.replace("0,", "-5,", 1), "line 1: a request arrives at -0.005 s"),
        ("a.jsonl", GOOD.replace("0,", "NaN,", 1), "line 1: a request arrives at nan s"),
        ("a.jsonl", GOOD.replace("0,", '"0",', 1), "line 1: timestamp is a number"),
        ("a.jsonl", GOOD.replace("0,", "9" * 400 + ",", 1), "line 1: a timestamp of 400 digits"),
        ("a.jsonl", "[" * 100_000, "line 1: not JSON"),
        ("a.jsonl", GOOD.replace("{", '{"priority": 11, '), "a whole number from -10 to 10"),
        ("a.jsonl", GOOD.replace("{", '{"priority": true, '), "line 1: priority is a whole number"),
        ("a.jsonl", "", "has no request"),
        ("a.csv", "when,what\n1,2\n", "line 1: the columns are seconds, input_length"),
        ("a.csv", HEAD + "1,2,3,\n1,2\n", "line 3: fewer values than the 4 columns"),
        ("a.csv", HEAD + "x,2,3,\n", "line 2: 'x' is not a number of seconds"),
        ("a.csv", HEAD + "1,2.5,3,\n", "line 2: input_length is a whole number"),
        ("a.csv", HEAD + "1,2,3,a\n", "line 2: hash_ids is a whole number"),
        ("a.csv", "priority," + HEAD + "-11,1,2,3,\n", "line 2: priority is a whole number from"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n5,1,1\n", "is not a date and time"),
        ("a.csv", "", "line 1: the columns are"),
    ],
)
def test_a_malformed_file_is_refused_by_its_line(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InvalidArgument) as raised:
        read_trace(path)
    assert message in raised.value.message
    assert str(path) in raised.value.message


def test_neither_a_file_nor_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=f"is neither a file nor one of {CONVERSATION}"):
        load_trace(str(tmp_path / "nothing.csv"))
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        read_trace(tmp_path / "binary.jsonl")


def test_quantiles_are_between_neighbours() -> None:
    assert quantile([], 0.5) == 0
    assert quantile([4], 0.99) == 4
    assert quantile([0, 10], 0.25) == 2.5
