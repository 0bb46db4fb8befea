"""Options from `--config` and `--set`: which one counts, and errors that name file and option."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway_service.__main__ import parse_arguments as parse_gateway
from kvstore_service.__main__ import parse_arguments as parse_store
from scheduler_service.__main__ import parse_arguments as parse_scheduler
from splitpoint.errors import InvalidArgument
from splitpoint.options import service, store
from splitpoint.options.option import Option, all_options
from splitpoint.options.values import given_values
from splitpoint_cli.stack.options import API_KEY
from worker_service.__main__ import parse_arguments as parse_worker

NAMES: Option[tuple[str, ...]] = Option("name", str, (), "Names.", is_repeatable=True)
OPTIONS = [*all_options(store.SECTIONS), NAMES]


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "options.toml"
        path.write_text(text)
        return str(path)

    return write


def test_the_command_line_beats_set_and_set_beats_the_file(file: Callable[[str], str]) -> None:
    config = file(
        'listen = "a:1"\nmodel = "m"\nmax-batch = 3\nmax-batched-tokens = 64\nserial = true'
    )
    found = parse_worker(["--config", config])
    assert (found.listen, found.model, found.max_batch) == ("a:1", Path("m"), 3)
    assert (found.max_batched_tokens, found.serial) == (64, True)
    assert found.verify_rate == 0.01, "the default"
    found = parse_worker(
        ["--config", config, "--set", "max-batch=4", "--set", "serial=false", "--listen", "b:2"]
    )
    assert (found.max_batch, found.serial, found.listen) == (4, False, "b:2")
    found = parse_worker(["--config", config, "--set", "max-batch=4", "--max-batch", "5"])
    assert found.max_batch == 5


def test_every_service_takes_them(file: Callable[[str], str]) -> None:
    config = file('listen = "a:1"\nlog-format = "json"')
    for parse, more in (
        (parse_store, ("--arena", "a", "--host-memory", "1MiB")),
        (parse_worker, ("--model", "m")),
        (parse_scheduler, ("--model", "m")),
        (parse_gateway, ()),
    ):
        found = parse(["--config", config, *more])
        assert (found.listen, found.log_format) == ("a:1", "json")


def test_several_values_are_a_list_and_the_command_line_replaces_them(
    file: Callable[[str], str],
) -> None:
    config = file('worker = ["a", "b"]\nlisten = "l"\nmodel = "m"')
    assert parse_scheduler(["--config", config]).worker == ["a", "b"]
    found = parse_scheduler(["--config", config, "--set", "worker=c", "--set", "worker=d"])
    assert found.worker == ["c", "d"]
    assert parse_scheduler(["--config", config, "--worker", "e"]).worker == ["e"]


@pytest.mark.parametrize(
    ("text", "field", "said"),
    [
        ("evict-above = 2", "evict-above", "--evict-above is at most 1, not 2"),
        ("evict-above = true", "evict-above", "--evict-above is a number, not True"),
        ("evict-above = nan", "evict-above", "--evict-above is a finite number, not nan"),
        ('chunk-tokens = "many"', "chunk-tokens", "--chunk-tokens is an integer, not 'many'"),
        ("chunk-tokens = 1.5", "chunk-tokens", "--chunk-tokens is an integer, not 1.5"),
        ('keep-arena = "yes"', "keep-arena", "--keep-arena is true or false, not 'yes'"),
        ("keep-arena = 1", "keep-arena", "--keep-arena is true or false, not 1"),
        ('eviction = "best"', "eviction", "--eviction: 'best' is not one of lru, fifo, counter"),
        ('host-memory = "lots"', "host-memory", "'lots'"),
        ("listen = true", "listen", "--listen is a text, not True"),
        ('name = ["a", []]', "name", "--name is a text, not []"),
        ("[store]\nlisten = 'a:1'", "store", "there is no option 'store'"),
        ("keep_arena = true", "keep_arena", "no option 'keep_arena'; did you mean keep-arena?"),
        ("evict-abov = 0.5", "evict-abov", "did you mean evict-above?"),
        ("zzzz = 0.5", "zzzz", "there is no option 'zzzz'"),
        ("keep-arena =", "config", "it is not TOML"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_with_its_name(
    file: Callable[[str], str], text: str, field: str, said: str
) -> None:
    config = file(text)
    with pytest.raises(InvalidArgument) as caught:
        given_values(OPTIONS, Path(config), [])
    assert caught.value.field == field
    assert config in caught.value.message
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("setting", "field", "said"),
    [
        ("evict-above=2", "evict-above", "--set: --evict-above is at most 1, not 2"),
        ("evict-above=half", "evict-above", "--set: --evict-above is a number, not 'half'"),
        ("keep-arena=1", "keep-arena", "--set: --keep-arena is true or false, not '1'"),
        ("keep-arena", "set", "--set 'keep-arena' is not NAME=VALUE"),
        ("evict-abov=1", "evict-abov", "--set: there is no option 'evict-abov'; did you mean"),
    ],
)
def test_what_is_wrong_in_set_is_told(setting: str, field: str, said: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        given_values(OPTIONS, None, [setting])
    assert caught.value.field == field
    assert caught.value.message.startswith(said)


@pytest.mark.parametrize(
    ("text", "key", "instead"),
    [
        ('api-key = "0123456789"', "api-key", "--api-key-file"),
        ('redis = "redis://me:secret@host/0"', "redis", "--redis-password-file"),
    ],
)
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o602])
def test_a_secret_is_not_read_from_a_file_that_is_open_to_others(
    file: Callable[[str], str], text: str, key: str, instead: str, mode: int
) -> None:
    options, config = [API_KEY, service.REDIS], Path(file(text))
    config.chmod(mode)
    with pytest.raises(InvalidArgument) as caught:
        given_values(options, config, [])
    assert caught.value.field == key
    for said in (str(config), f"--{key} ", f"chmod 600 {config}", instead):
        assert said in caught.value.message
    assert "secret@" not in caught.value.message
    assert "0123456789" not in caught.value.message
    config.chmod(0o600)
    assert list(given_values(options, config, [])) == [key.replace("-", "_")]


@pytest.mark.parametrize("url", ["redis://host:6379", "redis://me@host/0", "unix:///run/redis"])
def test_an_url_without_a_password_may_be_read_by_others(
    file: Callable[[str], str], url: str
) -> None:
    config = Path(file(f'redis = "{url}"'))
    config.chmod(0o644)
    assert given_values([service.REDIS], config, []) == {"redis": url}


def test_values_have_the_types_of_their_options(file: Callable[[str], str]) -> None:
    config = file('host-memory = 1048576\ntier-disk = "d"\nevict-above = 1\nname = "one"')
    expected: dict[str, Any] = {
        "host_memory": "1048576",
        "tier_disk": Path("d"),
        "evict_above": 1.0,
        "name": ["one"],
    }
    assert given_values(OPTIONS, Path(config), []) == expected
    assert given_values(OPTIONS, Path(config), ["name=a=b", "tier-disk=e"]) == {
        **expected,
        "name": ["a=b"],
        "tier_disk": Path("e"),
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--config", "/no/such"], "--config /no/such: No such file"),
        (["--set", "listn=a"], "did you mean listen?"),
        ([], "required: --listen"),
    ],
)
def test_a_service_ends_with_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_scheduler(["--model", "m", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
