"""What `--speculative-config` takes: vLLM's names, and errors that say what to write. Under 1 s."""

from __future__ import annotations

import json

import pytest

from splitpoint.errors import InvalidArgument
from splitpoint.options.speculation import SpeculativeConfig, read_speculative_config
from splitpoint.speculation import PLAIN, DraftMethod, Speculation


def test_without_the_option_nothing_is_drafted() -> None:
    assert read_speculative_config(None) is None
    assert not PLAIN.is_on


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("off", DraftMethod.OFF),
        ("auto", DraftMethod.AUTO),
        ("self", DraftMethod.SELF),
        ("suffix", DraftMethod.SUFFIX),
        ("ngram", DraftMethod.SUFFIX),
    ],
)
def test_methods_have_our_names_and_vllms(name: str, method: DraftMethod) -> None:
    text = json.dumps({"method": name, "num_speculative_tokens": 5, "prompt_lookup_min": 3})
    assert read_speculative_config(text) == SpeculativeConfig(Speculation(method, 5, 3))


@pytest.mark.parametrize("method", ["model", "draft_model", None])
def test_a_draft_model_is_its_own_method(method: str | None) -> None:
    values = {"model": "/drafts"} if method is None else {"model": "/drafts", "method": method}
    wanted = SpeculativeConfig(Speculation(DraftMethod.MODEL), "/drafts")
    assert read_speculative_config(json.dumps(values)) == wanted
    assert read_speculative_config(None, "/drafts") == wanted
    assert read_speculative_config(json.dumps(values), "/drafts") == wanted
    auto = SpeculativeConfig(Speculation(DraftMethod.AUTO), "/drafts")
    assert read_speculative_config('{"method": "auto"}', "/drafts") == auto


def test_it_can_be_passed_on() -> None:
    for text in (
        '{"method": "suffix"}',
        '{"method": "auto", "num_speculative_tokens": 0, "prompt_lookup_min": 7, "model": "/d"}',
    ):
        config = read_speculative_config(text)
        assert config is not None
        assert read_speculative_config(config.text) == config


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("suffix", "not JSON"),
        ("[]", "not a JSON object"),
        ("[" * 100_000, "not JSON"),
        ("{}", "method is missing: one of off, auto, self, suffix, model"),
        ('{"method": "eagle"}', "method 'eagle' is not one of off, auto"),
        ('{"method": ["suffix"]}', "method ['suffix'] is not one of"),
        ('{"method": 1}', "method 1 is not one of"),
        ('{"methode": "suffix"}', "unknown key 'methode'; known: method, num_speculative_tokens"),
        ('{"method": "suffix", "prompt_lookup_max": 4}', "unknown key 'prompt_lookup_max'"),
        ('{"method": "model"}', "method 'model' needs a draft model"),
        ('{"method": "model", "model": ""}', "model must be a string"),
        ('{"method": "model", "model": 3}', "model must be a string"),
        ('{"method": "suffix", "num_speculative_tokens": "4"}', 'must be an integer, not "4"'),
        ('{"method": "suffix", "num_speculative_tokens": true}', "must be an integer, not true"),
        ('{"method": "suffix", "num_speculative_tokens": 33}', "must be in [0, 32], not 33"),
        ('{"method": "suffix", "num_speculative_tokens": -1}', "must be in [0, 32], not -1"),
        ('{"method": "suffix", "prompt_lookup_min": 0}', "must be in [1, 64], not 0"),
        ('{"method": "suffix", "prompt_lookup_min": 1.5}', "must be an integer, not 1.5"),
    ],
)
def test_what_is_wrong_is_named(text: str, said: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_speculative_config(text)
    assert caught.value.field == "speculative_config"
    assert caught.value.message.startswith("--speculative-config: ")
    assert said in caught.value.message


def test_two_draft_models_are_a_contradiction() -> None:
    with pytest.raises(InvalidArgument, match="model is '/a', but --draft-model is '/b'"):
        read_speculative_config('{"model": "/a"}', "/b")
