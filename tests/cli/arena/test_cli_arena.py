"""`splitpoint arena` on real files: whole, damaged, in use, and none of ours."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvstore_helpers import LAYOUT, Bench
from own_names import instance_name
from page_helpers import PAGES, keys_of, store_pages
from typer.testing import CliRunner

from splitpoint.arena.files import NotOurArena
from splitpoint.arena.format import RECORD_BYTES, RECORDS_OFFSET, SUPERBLOCK_BYTES
from splitpoint.arena.mapping import Arena
from splitpoint.arena.owner import ArenaInUse, open_or_create_arena
from splitpoint.arena.records import (
    CHUNK_OFFSET,
    GRANT_OFFSET,
    NO_PARENT,
    ChunkBlock,
    GrantBlock,
    SlotRecord,
    SlotState,
    commit_word,
    encode_token_row,
    first_generation,
    salt_tag,
)
from splitpoint.config import arena_path, remove_tree
from splitpoint.errors import NotFound
from splitpoint.keys import chunk_key, fingerprint, pack_tokens
from splitpoint.shapes import ArenaLayout
from splitpoint_cli.arena.check import read_contents, read_slot
from splitpoint_cli.main import app
from splitpoint_cli.stack.child import child_environment

SLOTS = 8
FIRST = first_generation(1)
INSTANCE = instance_name("arena")


class Writer:
    """Fills slots as docs/arena-format.md says a store does."""

    def __init__(self, path: Path) -> None:
        opened = open_or_create_arena(path, LAYOUT, SLOTS)
        self.owner, self.arena = opened.owner, opened.arena
        self.path = path

    def commit(self, slot: int, state: SlotState, generation: int = FIRST) -> None:
        words = self.arena.metadata.cast("Q")
        words[(RECORDS_OFFSET + slot * RECORD_BYTES) // 8] = commit_word(generation, state)
        words.release()

    def grant(self, slot: int, generation: int = FIRST) -> None:
        block = GrantBlock(generation, 1, bytes(16), os.getpid(), 1).encode()
        self.write(RECORDS_OFFSET + slot * RECORD_BYTES + GRANT_OFFSET, block)
        self.commit(slot, SlotState.WRITING, generation)

    def seal(self, slot: int, tokens: list[int], salt: bytes, generation: int = FIRST) -> None:
        self.grant(slot, generation)
        for plane in range(LAYOUT.layer_count):
            for tensor in LAYOUT.tensors:
                rows = self.arena.plane(plane, tensor)[slot]
                heads = 1 if tensor == "X" else LAYOUT.kv_head_count
                rows.reshape(heads, LAYOUT.chunk_tokens, -1)[:, : len(tokens)] = tokens[0] % 251 + 1
        row = encode_token_row(pack_tokens(tokens), LAYOUT.chunk_tokens)
        self.write(self.arena.geometry.tokens_offset + slot * len(row), row)
        block = ChunkBlock(
            generation=generation,
            key=chunk_key(LAYOUT.layout_hash, salt, b"", tokens),
            parent_key=NO_PARENT,
            layout_hash=LAYOUT.layout_hash,
            salt_tag=salt_tag(salt),
            fingerprint=fingerprint(tokens),
            checksum=self.arena.checksum(slot),
            seal_number=slot + 1,
            token_count=len(tokens),
            chunk_index=0,
        )
        self.write(RECORDS_OFFSET + slot * RECORD_BYTES + CHUNK_OFFSET, block.encode())
        self.commit(slot, SlotState.SEALED, generation)

    def write(self, offset: int, data: bytes) -> None:
        self.arena.metadata[offset : offset + len(data)] = data

    def flip(self, offset: int) -> None:
        self.write(offset, bytes([self.arena.metadata[offset] ^ 1]))


@pytest.fixture
def writer() -> Iterator[Writer]:
    """An arena of an instance: 3 chunks of 2 tenants, one slot being written, the rest free."""
    made = Writer(arena_path(INSTANCE))
    made.seal(0, [1, 2, 3, 4], b"one")
    made.seal(2, [1, 2, 3, 4], b"two")
    made.seal(5, [7, 8], b"two")
    made.grant(3)
    try:
        yield made
    finally:
        made.arena.close()
        remove_tree(made.path.parent)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["arena", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def run_json(*arguments: str) -> tuple[int, dict[str, Any]]:
    code, printed = run(*arguments, "--json")
    answer: dict[str, Any] = json.loads(printed)
    return code, answer


def test_an_arena_of_pages(shm_folder: Path) -> None:
    bench = Bench(shm_folder, SLOTS, layout=PAGES)
    slots = store_pages(bench.store, bench.attach(), keys_of(1, 2, 3), b"one")
    path = str(bench.arena.path)
    code, printed = run("verify", path)
    assert code == 0
    assert "layout      pages of at most 0.98 KiB" in printed
    assert "pages       3 of 0.98 KiB, 1 salt, each compared with its checksum" in printed
    bench.arena.plane(0, "P")[slots[1], 1000] ^= 1
    code, found = run_json("verify", path)
    assert (code, found["slots"]["damaged"], found["token_count"]) == (1, 1, 0)
    assert found["layout"]["page_bytes"] == PAGES.page_bytes
    bench.close()


def test_inspect_counts_what_is_there(writer: Writer) -> None:
    code, found = run_json("inspect", INSTANCE)
    assert code == 0
    assert found["slots"] == {
        "free": 4,
        "writing": 1,
        "sealed": 3,
        "quarantined": 0,
        "damaged": 0,
        "changing": 0,
    }
    assert (found["chunk_count"], found["token_count"], found["salt_count"]) == (3, 10, 2)
    assert found["locked"] is True
    assert found["owner_process_id"] == os.getpid()
    assert found["owner_alive"] is True
    assert [copy["valid"] for copy in found["superblocks"]] == [True, True]
    assert ArenaLayout.from_json(json.dumps(found["layout"])) == LAYOUT
    writer.owner.leave()
    code, text = run("inspect", str(writer.path))
    assert code == 0
    assert "no store is running on it" in text
    assert "8: 4 free, 1 writing, 3 sealed" in text
    assert "3 of 768 B, 10 tokens, 2 salts" in text


def test_one_damaged_superblock_is_named_and_the_other_used(writer: Writer) -> None:
    writer.flip(SUPERBLOCK_BYTES + 2000)
    code, found = run_json("inspect", INSTANCE)
    assert code == 1
    assert found["superblocks"][0]["valid"] is True
    assert found["superblocks"][1]["invariant"] == "BadSuperblockChecksum"
    assert found["chunk_count"] == 3
    assert run("verify", INSTANCE)[0] == 1


def test_two_damaged_superblocks_make_it_unusable(writer: Writer) -> None:
    writer.flip(2000)
    writer.flip(SUPERBLOCK_BYTES)  # its magic
    code, found = run_json("inspect", INSTANCE)
    assert code == 1
    assert found["unusable"].startswith("NoValidSuperblock: ")
    assert [copy["invariant"] for copy in found["superblocks"]] == [
        "BadSuperblockChecksum",
        "BadMagic",
    ]
    code, text = run("inspect", INSTANCE)
    assert code == 1
    assert "BadMagic" in text


def test_verify_finds_nothing_in_a_whole_arena(writer: Writer) -> None:
    before = writer.path.read_bytes()
    code, found = run_json("verify", INSTANCE)
    assert code == 0
    assert found["payload_compared"]
    assert found["chunk_count"] == 3
    assert found["damages"] == []
    assert writer.path.read_bytes() == before


def test_verify_names_every_damaged_slot(writer: Writer) -> None:
    geometry = writer.arena.geometry
    writer.flip(geometry.tokens_offset)  # a token of slot 0
    writer.flip(RECORDS_OFFSET + 3 * RECORD_BYTES + GRANT_OFFSET)  # who writes slot 3
    writer.commit(4, SlotState(1), generation=0)
    writer.arena.plane(1, "V")[2, 0] ^= 1
    code, found = run_json("verify", INSTANCE)
    assert code == 1
    assert [(d["place"], d["invariant"]) for d in found["damages"]] == [
        ("slot 0", "FingerprintMismatch"),
        ("slot 2", "PayloadMismatch"),
        ("slot 3", "BadGrantChecksum"),
        ("slot 4", "BadGeneration"),
    ]
    assert found["chunk_count"] == 1
    code, text = run("verify", INSTANCE)
    assert code == 1
    assert "slot 2: PayloadMismatch: " in text
    assert "2 salts" not in text
    assert "each compared with its checksum" in text


def test_a_row_past_the_tokens_is_damage(writer: Writer) -> None:
    writer.arena.plane(0, "K")[5, -1] = 1
    chunk = ChunkBlock.decode(writer.arena.record(5))
    fixed = dataclasses.replace(chunk, checksum=writer.arena.checksum(5))
    writer.write(RECORDS_OFFSET + 5 * RECORD_BYTES + CHUNK_OFFSET, fixed.encode())
    _, found = run_json("verify", INSTANCE)
    assert [(d["place"], d["invariant"]) for d in found["damages"]] == [("slot 5", "RowsNotZero")]


def test_a_slot_evicted_during_the_look_is_no_damage(writer: Writer) -> None:
    class Evicting(Arena):
        def check_payload(self, slot: int, token_count: int, checksum: int) -> None:
            writer.commit(slot, SlotState.FREE)
            writer.arena.plane(0, "K")[slot] = 99
            super().check_payload(slot, token_count, checksum)

    reader = Evicting.attach_read_only(writer.path)
    found = read_slot(reader, 0, with_payload=True)
    assert isinstance(found, SlotRecord)
    assert found.state is SlotState.FREE
    reader.close()


def test_a_slot_that_never_stands_still_is_no_damage(writer: Writer) -> None:
    words = itertools.count(1)

    class Restless(Arena):
        def commit_word(self, slot: int) -> int:
            return next(words)

    reader = Restless.attach_read_only(writer.path)
    contents = read_contents(reader, with_payload=True)
    assert contents.changing_count == SLOTS
    assert contents.damages == ()
    reader.close()


def test_verify_beside_a_busy_writer_finds_no_damage(writer: Writer) -> None:
    """A slot that is sealed and evicted all the time, each life with other bytes."""
    stop = threading.Event()

    def work() -> None:
        generation = 1 << 32 | 1
        while not stop.is_set():
            generation += 1
            writer.seal(6, [generation & 0xFFFF], b"one", generation)
            writer.commit(6, SlotState.FREE, generation)

    worker = threading.Thread(target=work)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # or the two would hardly ever meet inside a slot
    worker.start()
    reader = Arena.attach_read_only(writer.path)
    try:
        for _ in range(200):
            assert read_contents(reader, with_payload=True).damages == ()
    finally:
        stop.set()
        worker.join()
        sys.setswitchinterval(interval)
        reader.close()


def test_rm_refuses_an_arena_in_use(writer: Writer) -> None:
    with pytest.raises(ArenaInUse):
        run("rm", INSTANCE)
    assert writer.path.exists()
    assert run("verify", INSTANCE)[0] == 0


def test_rm_removes_arena_lock_key_and_folder(writer: Writer) -> None:
    (writer.path.parent / "key").write_bytes(bytes(32))
    writer.owner.leave()
    assert run("rm", INSTANCE)[0] == 0
    assert not writer.path.parent.exists()


def test_rm_takes_damaged_arenas_too(writer: Writer) -> None:
    writer.flip(2000)
    writer.flip(SUPERBLOCK_BYTES + 2000)
    writer.owner.leave()
    assert run("rm", str(writer.path))[0] == 0
    assert not writer.path.parent.exists()


def test_rm_leaves_strangers_alone(shm_folder: Path) -> None:
    letter = shm_folder / "letter"
    letter.write_text("dear " * 5000)
    letter.chmod(0o600)
    link = shm_folder / "link"
    link.symlink_to(letter)
    for path in (letter, link):
        with pytest.raises(NotOurArena):
            run("rm", str(path))
    assert sorted(path.name for path in shm_folder.iterdir()) == ["letter", "link"]


def test_other_files_of_the_folder_stay(shm_folder: Path) -> None:
    opened = open_or_create_arena(shm_folder / "arena", LAYOUT, SLOTS)
    opened.arena.close()
    opened.owner.leave()
    (shm_folder / "key").write_text("not ours to remove")
    assert run("rm", str(shm_folder / "arena"))[0] == 0
    assert [path.name for path in shm_folder.iterdir()] == ["key"]


def test_a_missing_arena_names_those_that_are_there(writer: Writer) -> None:
    with pytest.raises(NotFound, match=INSTANCE):
        run("inspect", "no-such-instance")


def test_the_read_only_mapping_cannot_be_written(writer: Writer) -> None:
    arena = Arena.attach_read_only(writer.path)
    with pytest.raises(ValueError, match="read-only"):
        arena.plane(0, "K")[0, 0] = 1
    with pytest.raises(TypeError):
        arena.metadata[0] = 1
    arena.close()


def test_the_command_line_says_it_in_one_line(writer: Writer) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "splitpoint_cli", "arena", "rm", INSTANCE],
        capture_output=True,
        text=True,
        timeout=60,
        env=child_environment({}),
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("splitpoint: FAILED_PRECONDITION: another store is running on ")
