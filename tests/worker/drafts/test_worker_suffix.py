"""Test drafts from earlier occurrences against brute force; pure, 1 s."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from draft_targets import TargetDouble

from splitpoint.speculation import DraftMethod, Speculation
from worker_service.drafts.suffix import Corpus, Cursor, SuffixAutomaton, SuffixDrafter


def longest_end(text: Sequence[int], inside: Sequence[int]) -> int:
    """Length of the longest end of `text` that occurs in `inside`."""
    whole, end = bytes(inside), bytes(text)
    lengths = range(len(end), 0, -1)
    return next((length for length in lengths if end[-length:] in whole), 0)


@pytest.mark.parametrize("seed", range(6))
def test_the_longest_end_that_occurred_before_is_found(seed: int) -> None:
    rng = random.Random(seed)
    letters = rng.choice([2, 3, 6])
    automaton, text = SuffixAutomaton(), list[int]()
    for _ in range(120):
        if text and rng.random() < 0.1:
            start = rng.randrange(len(text))
            more = text[start : start + 9]
        else:
            more = [rng.randrange(letters)]
        for token in more:
            text.append(token)
            length, end = automaton.append(token)
            # Ends that overlap themselves count: all but the whole text.
            wanted = longest_end(text[1:], text[:-1])
            assert length == wanted
            if length:
                assert end < len(text) - 1
                assert text[end + 1 - length : end + 1] == text[-length:]


@pytest.mark.parametrize("seed", range(6))
def test_a_cursor_follows_another_text_while_the_automaton_grows(seed: int) -> None:
    rng = random.Random(seed)
    automaton, cursor = SuffixAutomaton(), Cursor()
    known, other = list[int](), list[int]()
    for step in range(100):
        if step < 30 or rng.random() < 0.3:
            known.append(rng.randrange(3))
            automaton.append(known[-1])
            # What the cursor has now is right, but may be longer in what came since.
            assert cursor.length <= longest_end(other, known)
        else:
            other.append(rng.randrange(3))
            before = cursor.length
            automaton.advance(cursor, other[-1])
            length = cursor.length
            assert length <= before + 1
            end = automaton.end_of(cursor)
            if length:
                assert known[end + 1 - length : end + 1] == other[-length:]
            else:
                assert end == -1
    fixed = Cursor()
    for place, token in enumerate(other):
        automaton.advance(fixed, token)
        assert fixed.length == longest_end(other[: place + 1], known)


def test_a_repeated_passage_is_drafted_as_far_as_the_evidence_goes() -> None:
    drafter = SuffixDrafter()
    passage = list(range(10, 30))
    target = TargetDouble(("a", 0, 0), [1, 2, *passage, 3, 4, 10])
    assert drafter.propose([(target, 8)]) == [[]]  # a single token is less than the least
    target.tokens.append(11)
    assert drafter.propose([(target, 8)]) == [[12, 13, 14, 15]]
    target.tokens += [12, 13, 14, 15]
    assert drafter.propose([(target, 8)]) == [[*range(16, 24)]]
    assert drafter.propose([(target, 3)]) == [[16, 17, 18]]
    target.tokens += [99]
    assert drafter.propose([(target, 8)]) == [[]]


def test_the_latest_of_several_occurrences_goes_on() -> None:
    drafter = SuffixDrafter()
    target = TargetDouble(("a", 0, 0), [5, 6, 7, 1, 5, 6, 8, 2, 5, 6])
    assert drafter.propose([(target, 8)]) == [[8, 2, 5, 6]]


def test_a_text_that_repeats_itself_is_drafted_round_and_round() -> None:
    drafter = SuffixDrafter()
    target = TargetDouble(("a", 0, 0), [9, *[1, 2, 3] * 4])
    assert drafter.propose([(target, 7)]) == [[1, 2, 3, 1, 2, 3, 1]]


def test_the_least_length_is_the_requests_own() -> None:
    drafter = SuffixDrafter()
    for least, drafted in ((1, [7, 8]), (2, [])):
        speculation = Speculation(DraftMethod.SUFFIX, prompt_lookup_min=least)
        key = (str(least), 0, 0)
        target = TargetDouble(key, [6, 7, 8, 6], speculation=speculation)
        assert drafter.propose([(target, 4)]) == [drafted]


def test_answers_are_drafted_to_their_tenant_only() -> None:
    drafter = SuffixDrafter()
    answer = list(range(50, 60))
    first = TargetDouble(("a", 0, 0), [1, 2, *answer], prompt_length=2, salt=b"one")
    drafter.propose([(first, 4)])
    first.tokens.append(60)
    drafter.forget(first.key, has_ended=True)
    drafter.propose([])  # reads the answer in
    mine = TargetDouble(("b", 0, 0), [7, 50, 51, 52, 53], prompt_length=1, salt=b"one")
    other = TargetDouble(("c", 0, 0), [7, 50, 51, 52, 53], prompt_length=1, salt=b"two")
    prompt = TargetDouble(("d", 0, 0), [9, 9, 8, 1, 2], prompt_length=1, salt=b"one")
    assert drafter.propose([(mine, 8), (other, 8), (prompt, 8)]) == [[*range(54, 61)], [], []]
    # A draft ends with the answer that it comes from.
    mine.tokens += [54, 55, 56, 57, 58]
    assert drafter.propose([(mine, 8)]) == [[59, 60]]


def test_a_long_prompt_is_read_in_over_several_steps() -> None:
    drafter = SuffixDrafter(tokens_at_once=100)
    target = TargetDouble(("a", 0, 0), [*range(300), 0, 1])
    drafts = [drafter.propose([(target, 4)])[0] for _ in range(4)]
    assert drafts == [[], [], [], [2, 3, 4, 5]]


def test_a_corpus_is_bounded_and_forgets_the_oldest_answers() -> None:
    corpus = Corpus(part_tokens=50)
    for number in range(20):
        corpus.add(range(100 * number, 100 * number + 20))
        assert corpus.read_in(1000) > 0
        assert len(corpus.parts) <= 2
        assert all(len(part.text) <= 50 for part in corpus.parts)
    kept = {token for part in corpus.parts for token in part.text}
    assert 1919 in kept
    assert 119 not in kept
    corpus.add(range(1000))
    assert corpus.read_in(30) == 0


def ended(drafter: SuffixDrafter, name: str, answer: Sequence[int], salt: bytes) -> None:
    """Let a request end with an answer."""
    target = TargetDouble((name, 0, 0), [1, 2, *answer], prompt_length=2, salt=salt)
    drafter.propose([(target, 2)])
    drafter.forget(target.key, has_ended=True)


def test_answers_that_nobody_reads_in_are_dropped_whole_the_oldest_first() -> None:
    corpus = Corpus(part_tokens=50)
    corpus.add(range(10))
    corpus.read_in(4)
    for number in range(100):
        corpus.add(range(100 * number, 100 * number + 30))
        assert corpus.backlog <= 101
    corpus.read_in(1000)
    assert corpus.backlog == 0
    text = [token for part in corpus.parts for token in part.text]
    assert text[-31:] == [-101, *range(9900, 9930)]
    assert text[-62:-31] == [-100, *range(9800, 9830)]


def test_answers_are_read_in_beside_long_prompts() -> None:
    """Prompts leave nothing of each call for longer than the answer takes."""
    drafter = SuffixDrafter(tokens_at_once=100)
    ended(drafter, "a", range(50, 150), b"one")
    long = TargetDouble(("long", 0, 0), [5] * 16_000, prompt_length=16_000)
    for _ in range(5):
        drafter.propose([(long, 2)])
    mine = TargetDouble(("b", 0, 0), [7, 50, 51, 52], prompt_length=1, salt=b"one")
    assert drafter.propose([(mine, 8), (long, 2)]) == [[*range(53, 59)], []]


def test_a_sequence_that_leaves_the_device_is_read_in_once_and_answers_once() -> None:
    drafter = SuffixDrafter(tokens_at_once=100)
    target = TargetDouble(("a", 0, 0), [*range(80), 3, 4], prompt_length=80, salt=b"one")
    assert drafter.propose([(target, 4)]) == [[5, 6, 7, 8]]
    for _ in range(5):
        drafter.forget(target.key, has_ended=False)
        target.tokens.append(len(target.tokens))
        # All of the prompt is there: 100 tokens would not read it in again besides.
        other = TargetDouble(("b", len(target.tokens), 0), [9] * 99)
        assert drafter.propose([(target, 4), (other, 1)])[1] == [9]
    drafter.forget(target.key, has_ended=True)
    for _ in range(9):
        drafter.propose([])
    assert [part.text for part in drafter._corpora[b"one"].parts] == [[-1, *target.tokens[80:]]]


def test_a_text_that_has_grown_too_long_is_begun_anew() -> None:
    drafter = SuffixDrafter(most_text_tokens=100)
    target = TargetDouble(("a", 0, 0), [1, 2, 3])
    for token in range(1000):
        target.tokens.append(token % 30)
        [draft] = drafter.propose([(target, 4)])
        assert len(drafter._followed[target.key].own.text) <= 100
        if token > 70:
            # The newest half of the text has all of it.
            assert draft == [(token + more) % 30 for more in range(1, 5)]


def test_answers_of_all_salts_together_are_bounded() -> None:
    """Many salts of little text displace none; those unused for the longest go first."""
    drafter = SuffixDrafter(most_corpus_tokens=1000)
    for number in range(30):
        ended(drafter, str(number), [3, 4], bytes([number]))
    assert len(drafter._corpora) == 30
    ended(drafter, "large", range(980), b"large")
    assert sum(corpus.size for corpus in drafter._corpora.values()) <= 1000
    assert list(drafter._corpora) == [*(bytes([number]) for number in range(24, 30)), b"large"]
    for number in range(100):
        ended(drafter, str(number), [], bytes([number]))
    assert len(drafter._corpora) == 64
    assert not drafter._followed
