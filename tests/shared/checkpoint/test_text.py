"""Token streams equal whole decodes, and stop strings do not see token borders."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from long_runs import scaled
from tiny_tokenizers import BYTES, CORPUS, byte_level, sentencepiece
from tokenizers import (
    AddedToken,
    models,
    normalizers,
    pre_tokenizers,
)

from splitpoint.checkpoint.text import TextStream, Tokenizer, TooManyTokens
from splitpoint.errors import InvalidArgument

ROOT = Path(__file__).parents[3]
BACKENDS = {
    "byte-level": byte_level(),
    "llama-2": sentencepiece(metaspace=False),
    "metaspace": sentencepiece(metaspace=True),
    "bundled": tokenizers.Tokenizer.from_file(str(ROOT / "models/stdlib-llama/tokenizer.json")),
}
TOKENIZERS = {name: Tokenizer(backend) for name, backend in BACKENDS.items()}
LLAMA_LIKE = ("llama-2", "metaspace")
names = st.sampled_from(sorted(BACKENDS))
texts = st.text(max_size=40) | st.text("ab \n—é你😀", max_size=30)


def stream(tokenizer: Tokenizer, ids: list[int], stops: tuple[str, ...] = ()) -> str:
    text = TextStream(tokenizer, stops)
    return "".join([text.push([index]) for index in ids] + [text.finish()])


def byte_runs_are_text(backend: tokenizers.Tokenizer, ids: list[int]) -> bool:
    """Return True if every run of byte tokens is UTF-8 (where the library's decode is sound)."""
    run = b""
    for index in [*ids, -1]:
        spelling = backend.id_to_token(index) if index >= 0 else None
        if spelling in BYTES:
            run += bytes([BYTES.index(spelling)])
            continue
        if spelling in ("<s>", "</s>", "<unk>"):
            continue  # skipped before decoding, so it does not end the run
        try:
            run.decode()
        except UnicodeDecodeError:
            return False
        run = b""
    return True


@pytest.mark.scaled
@given(name=names, text=texts | st.text("ab \n", min_size=500, max_size=900))
@settings(max_examples=scaled(50, chaos=400))
def test_bytes_tell_the_fewest_tokens(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    fewest, ids = tokenizer.fewest_tokens(text), tokenizer.encode(text)
    assert fewest <= len(ids)
    assert fewest > 0 or not text
    assert tokenizer.encode(text, len(ids)) == ids
    if ids:
        with pytest.raises(TooManyTokens) as caught:
            tokenizer.encode(text, len(ids) - 1)
        assert fewest <= caught.value.count <= len(ids)


def unbounded(change: Callable[[tokenizers.Tokenizer], object]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(byte_level().to_str())
    change(backend)
    return backend


@pytest.mark.parametrize(
    ("backend", "text"),
    [
        (
            unbounded(lambda backend: backend.add_tokens([AddedToken("!", rstrip=True)])),
            "!" + " " * 999,
        ),
        (unbounded(lambda b: setattr(b, "normalizer", normalizers.Strip())), " " * 999),
        (unbounded(lambda b: setattr(b, "normalizer", normalizers.Replace("ab", "c"))), "ab" * 400),
        (unbounded(lambda b: setattr(b, "pre_tokenizer", pre_tokenizers.Whitespace())), " " * 999),
        (
            tokenizers.Tokenizer(
                models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True)
            ),
            "b" * 999,
        ),
        (tokenizers.Tokenizer(models.BPE({"a": 0}, [])), "b" * 999),
        (tokenizers.Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, "<unk>")), "b" * 999),
    ],
)
def test_tokenizers_that_drop_or_join_have_no_such_bound(
    backend: tokenizers.Tokenizer, text: str
) -> None:
    tokenizer = Tokenizer(backend)
    assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text)) < 500


def test_other_threads_run_while_a_long_text_is_tokenized() -> None:
    tokenizer, ended, turns = TOKENIZERS["bundled"], threading.Event(), 0
    text = "def read(path): return path\n" * 20_000

    def encode() -> None:
        tokenizer.encode(text)
        ended.set()

    thread = threading.Thread(target=encode)
    thread.start()
    while not ended.is_set():
        time.sleep(0.001)
        turns += 1
    thread.join()
    assert turns > 10


@pytest.mark.scaled
@given(name=names, data=st.data())
@settings(max_examples=scaled(80, chaos=600))
def test_random_tokens_stream_to_the_whole_decode(name: str, data: st.DataObject) -> None:
    backend, tokenizer = BACKENDS[name], TOKENIZERS[name]
    # Half of the ids come from the bytes and special tokens at the front.
    ids = data.draw(
        st.lists(st.integers(0, 262) | st.integers(0, backend.get_vocab_size() + 20), max_size=30)
    )
    expected = backend.decode(ids, skip_special_tokens=True)
    if name not in LLAMA_LIKE or byte_runs_are_text(backend, ids):
        assert stream(tokenizer, ids) == expected
    else:
        # Characters that were complete stay; the library would undo them.
        assert stream(tokenizer, ids).count("\ufffd") <= expected.count("\ufffd")
    assert tokenizer.decode(ids) == stream(tokenizer, ids)


@pytest.mark.scaled
@given(name=names, text=texts)
@settings(max_examples=scaled(50, chaos=300))
def test_texts_come_back(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    assert stream(tokenizer, ids) == BACKENDS[name].decode(ids, skip_special_tokens=True)


def id_of(name: str, token: str) -> int:
    found = BACKENDS[name].token_to_id(token)
    assert found is not None
    return found


def bytes_of(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    return b"".join(map(tokenizer.token_bytes, ids))


@pytest.mark.scaled
@given(name=names, text=texts)
@settings(max_examples=scaled(50, chaos=300))
def test_the_bytes_of_tokens_are_those_of_their_text(name: str, text: str) -> None:
    """Also of tokens that are parts of a character.

    SentencePiece puts a space before a text, and its decoder drops those at the start.
    """
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, adds_special_tokens=False)
    expected = BACKENDS[name].decode(ids, skip_special_tokens=False).encode()
    found = bytes_of(tokenizer, ids)
    if name in LLAMA_LIKE:
        found, expected = found.lstrip(b" "), expected.lstrip(b" ")
    assert found == expected


@pytest.mark.scaled
@given(name=names, data=st.data())
@settings(max_examples=scaled(50, chaos=300))
def test_the_bytes_of_any_tokens_make_the_streamed_text(name: str, data: st.DataObject) -> None:
    backend, tokenizer = BACKENDS[name], TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(3, backend.get_vocab_size() + 20), max_size=30))
    ids = [index for index in ids if not tokenizer.is_silent(index)]
    found = bytes_of(tokenizer, ids).decode(errors="replace")
    said = stream(tokenizer, ids)
    if name not in LLAMA_LIKE:
        assert found == said
    elif byte_runs_are_text(backend, ids):
        assert said.lstrip(" ") == found.lstrip(" ")


def test_special_tokens_have_the_bytes_of_their_spelling_and_unknown_ones_none() -> None:
    for name, tokenizer in TOKENIZERS.items():
        assert tokenizer.token_bytes(id_of(name, "</s>")) == b"</s>"
        assert tokenizer.token_bytes(1 << 20) == b""
    tokenizer = TOKENIZERS["byte-level"]
    for text in ("<tool call>", "日本"):
        assert tokenizer.token_bytes(id_of("byte-level", text)) == text.encode()
    assert TOKENIZERS["llama-2"].token_bytes(id_of("llama-2", "<0xE4>")) == b"\xe4"


@pytest.mark.scaled
@given(name=names, data=st.data())
@settings(max_examples=scaled(40, chaos=200))
def test_special_tokens_stay_in_the_text_if_asked(name: str, data: st.DataObject) -> None:
    backend, tokenizer = BACKENDS[name], TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, 5) | st.integers(0, 290), max_size=20))
    if name not in LLAMA_LIKE or byte_runs_are_text(backend, ids):
        expected = backend.decode(ids, skip_special_tokens=False)
        assert tokenizer.decode(ids, keeps_special_tokens=True) == expected


@pytest.mark.scaled
@given(name=names, text=texts)
@settings(max_examples=scaled(40, chaos=200))
def test_no_push_ends_inside_a_character(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    whole, seen = TextStream(tokenizer, ()), ""
    decoded = tokenizer.decode(tokenizer.encode(text))
    for index in tokenizer.encode(text):
        seen += whole.push([index])
        assert decoded.startswith(seen)


@pytest.mark.scaled
@given(
    text=st.text("abc", max_size=24),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    data=st.data(),
)
@settings(max_examples=scaled(80, chaos=500))
def test_matches_do_not_depend_on_token_borders(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    """Against brute force: the first end of any stop string, the longest one there."""
    backend = BACKENDS["bundled"]
    pieces = []
    rest = text
    while rest:
        size = data.draw(st.integers(1, min(3, len(rest))))
        pieces.append(rest[:size])
        rest = rest[size:]
    ids = [
        index for piece in pieces for index in backend.encode(piece, add_special_tokens=False).ids
    ]

    expected, matched = text, None
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            matched = max(ending, key=len)
            expected = text[: end - len(matched)]
            break

    result = TextStream(TOKENIZERS["bundled"], stops)
    seen = "".join(result.push([index]) for index in ids)
    early = result.matched_stop
    assert seen + result.finish() == expected
    assert early == result.matched_stop == matched
    grouped = TextStream(TOKENIZERS["bundled"], stops)
    assert grouped.push(ids) + grouped.finish() == expected


@pytest.mark.scaled
@given(name=names, data=st.data())
@settings(max_examples=scaled(40, chaos=200))
def test_special_tokens_can_be_kept(name: str, data: st.DataObject) -> None:
    """Each comes as it is spelled, between texts that are the same without it."""
    tokenizer = TOKENIZERS[name]
    special = data.draw(st.sampled_from(sorted(special_tokens(name))))
    before, after = (
        BACKENDS[name].encode(text, add_special_tokens=False).ids
        for text in (data.draw(texts.filter(str.strip)), "a b")
    )
    text = TextStream(tokenizer, (), keeps_special=True)
    pieces = [text.push([index]) for index in [*before, special, *after]] + [text.finish()]
    spelling = tokenizer.spelling([special])[0]
    head, found, tail = "".join(pieces).rpartition(spelling)
    assert found == spelling
    assert head == stream_keeping(tokenizer, before)
    assert tail.strip() == "a b"
    # Without the setting the same tokens have no text for it.
    assert spelling not in stream(tokenizer, [special, *after])


def stream_keeping(tokenizer: Tokenizer, ids: list[int]) -> str:
    text = TextStream(tokenizer, (), keeps_special=True)
    return text.push(ids) + text.finish()


def special_tokens(name: str) -> list[int]:
    decoder = BACKENDS[name].get_added_tokens_decoder()
    return [index for index, token in decoder.items() if token.special]


def test_a_stop_string_may_hold_a_special_token() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    end = BACKENDS["byte-level"].get_vocab()["</s>"]
    text = TextStream(tokenizer, ["</s>def"], keeps_special=True)
    ids = [*tokenizer.encode("a"), end, *tokenizer.encode("def")]
    assert text.push(ids) == "a"
    assert text.matched_stop == "</s>def"


def test_matched_text_is_never_said() -> None:
    tokenizer = TOKENIZERS["bundled"]
    ids = tokenizer.encode("return value\n\ndef")
    text = TextStream(tokenizer, ["\n\ndef", "never"])
    said = [text.push([index]) for index in ids]
    assert "".join(said) == "return value"
    assert text.matched_stop == "\n\ndef"
    assert text.push(ids) == text.finish() == ""


def test_a_prefix_of_a_stop_string_comes_out_at_the_end() -> None:
    tokenizer = TOKENIZERS["bundled"]
    text = TextStream(tokenizer, ["x = 12345"])
    said = text.push(tokenizer.encode("x = 123"))
    assert said == ""
    assert text.finish() == "x = 123"
    assert text.matched_stop is None


def test_min_tokens_let_early_matches_pass() -> None:
    tokenizer = TOKENIZERS["bundled"]
    ids = tokenizer.encode("a\nb\nc\nd")
    newlines = [n for n, index in enumerate(ids, 1) if "\n" in tokenizer.decode([index])]
    assert len(newlines) == 3
    for count, expected in ((newlines[0], "a"), (newlines[0] + 1, "a\nb"), (99, "a\nb\nc\nd")):
        text = TextStream(tokenizer, ["\n"], min_tokens=count)
        assert text.push(ids) + text.finish() == expected


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_endless_invalid_bytes_come_out_in_time(name: str) -> None:
    backend, tokenizer = BACKENDS[name], TOKENIZERS[name]
    broken = next(
        index
        for index in range(backend.get_vocab_size())
        if backend.decode([index]) == "\ufffd" and not tokenizer.is_silent(index)
    )
    ids = [broken] * 300
    text = TextStream(tokenizer, ())
    said = text.push(ids)
    assert len(said) >= 200
    assert said + text.finish() == backend.decode(ids)


def test_opt_folders_and_the_config_agree_with_transformers(tmp_path: Path) -> None:
    from transformers import GPT2Tokenizer

    byte_level().model.save(str(tmp_path))
    config = {"bos_token": {"content": "</s>"}, "add_bos_token": True, "unk_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = Tokenizer.load(tmp_path)
    merges: Any = [  # pairs, which its annotation does not know
        tuple(line.split(" "))
        for line in (tmp_path / "merges.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    theirs = GPT2Tokenizer(
        vocab=json.loads((tmp_path / "vocab.json").read_text()),
        merges=merges,
        bos_token="</s>",
        unk_token="</s>",
        eos_token="</s>",
        add_bos_token=True,
    )
    assert ours is not None
    for text in (*CORPUS[:3], "", " ", "</s>again"):
        assert ours.encode(text) == theirs(text)["input_ids"]
    assert ours.encode("dog")[0] == 1
    assert ours.decode([1, *ours.encode("dog")]) == "dog"


def test_an_explicit_flag_replaces_the_template(tmp_path: Path) -> None:
    sentencepiece(metaspace=False).save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.load(tmp_path)
    assert ours is not None
    assert ours.encode("dog")[0] == 1
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False}
    config["add_eos_token"] = True
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = Tokenizer.load(tmp_path)
    assert ours is not None
    assert ours.encode("dog")[0] != 1
    assert ours.encode("dog")[-1] == 2


def test_missing_and_broken_tokenizers(tmp_path: Path) -> None:
    assert Tokenizer.load(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{]")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        Tokenizer.load(tmp_path)
    with pytest.raises(InvalidArgument, match="empty"):
        TextStream(TOKENIZERS["bundled"], [""])


def test_spellings() -> None:
    tokenizer = TOKENIZERS["bundled"]
    assert tokenizer.spelling([0, 10**6]) == ["<s>", ""]
