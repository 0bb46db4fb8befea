"""Test drafts from earlier occurrences against brute force; pure, 1 s."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from draft_targets import TargetDouble

from splitpoint.speculation import DraftMethod, Speculation
from worker_service.drafts.automaton import Cursor, SuffixAutomaton
from worker_service.drafts.suffix import Corpus, SuffixDrafter


def longest_end(text: Sequence[int], inside: Sequence[int]) -> int:
    """Length of the longest end of `text` that occurs in `inside`."""
    for length in range(len(text), 0, -1):
        end = list(text[-length:])
        if any(list(inside[i : i + length]) == end for i in range(len(inside) - length + 1)):
            return length
    return 0


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
    target = TargetDouble(("a", 0), [1, 2, *passage, 3, 4, 10])
    assert drafter.propose([(target, 8)]) == [[]]  # a single token is less than the least
    target.tokens.append(11)
    assert drafter.propose([(target, 8)]) == [[12, 13]]
    target.tokens += [12, 13, 14, 15]
    assert drafter.propose([(target, 8)]) == [[16, 17, 18, 19, 20, 21]]
    assert drafter.propose([(target, 3)]) == [[16, 17, 18]]
    target.tokens += [99]
    assert drafter.propose([(target, 8)]) == [[]]


def test_the_latest_of_several_occurrences_goes_on() -> None:
    drafter = SuffixDrafter()
    target = TargetDouble(("a", 0), [5, 6, 7, 1, 5, 6, 8, 2, 5, 6])
    assert drafter.propose([(target, 8)]) == [[8, 2]]


def test_a_text_that_repeats_itself_is_drafted_round_and_round() -> None:
    drafter = SuffixDrafter()
    target = TargetDouble(("a", 0), [9, *[1, 2, 3] * 4])
    assert drafter.propose([(target, 7)]) == [[1, 2, 3, 1, 2, 3, 1]]


def test_the_least_length_is_the_requests_own() -> None:
    drafter = SuffixDrafter()
    for least, drafted in ((1, [7]), (2, [])):
        speculation = Speculation(DraftMethod.SUFFIX, prompt_lookup_min=least)
        key = (str(least), 0)
        target = TargetDouble(key, [6, 7, 8, 6], speculation=speculation)
        assert drafter.propose([(target, 4)]) == [drafted]


def test_answers_are_drafted_to_their_tenant_only() -> None:
    drafter = SuffixDrafter()
    answer = list(range(50, 60))
    first = TargetDouble(("a", 0), [1, 2, *answer], prompt_length=2, salt=b"one")
    drafter.propose([(first, 4)])
    first.tokens.append(60)
    drafter.forget(first.key)
    drafter.propose([])  # reads the answer in
    mine = TargetDouble(("b", 0), [7, 50, 51, 52, 53], prompt_length=1, salt=b"one")
    other = TargetDouble(("c", 0), [7, 50, 51, 52, 53], prompt_length=1, salt=b"two")
    prompt = TargetDouble(("d", 0), [9, 9, 8, 1, 2], prompt_length=1, salt=b"one")
    assert drafter.propose([(mine, 8), (other, 8), (prompt, 8)]) == [[54, 55, 56, 57], [], []]
    # A draft ends with the answer that it comes from.
    mine.tokens += [54, 55, 56, 57, 58]
    assert drafter.propose([(mine, 8)]) == [[59, 60]]


def test_a_long_prompt_is_read_in_over_several_steps() -> None:
    drafter = SuffixDrafter(tokens_at_once=100)
    target = TargetDouble(("a", 0), [*range(300), 0, 1])
    drafts = [drafter.propose([(target, 4)])[0] for _ in range(4)]
    assert drafts == [[], [], [], [2, 3]]


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


def test_tenants_are_bounded() -> None:
    drafter = SuffixDrafter()
    for number in range(30):
        target = TargetDouble((str(number), 0), [1, 2, 3, 4], salt=bytes([number]))
        drafter.propose([(target, 2)])
        drafter.forget(target.key)
    assert len(drafter._corpora) == 8
    assert not drafter._followed
