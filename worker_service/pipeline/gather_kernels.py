"""The Triton kernels that copy scattered slots and rows; imported only where Triton is wanted.

They read host memory that the driver registered, through its own address, so that one launch
replaces many copies. They copy words and know no planes.
"""

from __future__ import annotations

import triton
import triton.language as tl


# Numbers and alignments that differ from transfer to transfer must not select another
# compiled kernel: compiling takes longer than any transfer.
@triton.jit(do_not_specialize=["slots", "pages", "blocks_per_slot", "block_count"])
def gather_slots(
    target,
    source,
    slots,
    pages,
    slot_words,
    blocks_per_slot,
    block_count,
    block: tl.constexpr,
):
    """Do `target[pages[i]] = source[slots[i]]` for slots of `slot_words` words each.

    A fixed number of programs copies the blocks in turn: a transfer that waits for the
    link must leave most of the device to the computation beside it.
    """
    number = tl.program_id(0)
    programs = tl.num_programs(0)
    while number < block_count:
        index = number // blocks_per_slot
        offsets = (number % blocks_per_slot) * block + tl.arange(0, block)
        inside = offsets < slot_words
        # int64: a plane is larger than 2**31 words.
        slot = tl.load(slots + index).to(tl.int64)
        page = tl.load(pages + index).to(tl.int64)
        words = tl.load(source + slot * slot_words + offsets, mask=inside)
        tl.store(target + page * slot_words + offsets, words, mask=inside)
        number += programs


# A number that differs from step to step must not select another compiled kernel.
@triton.jit(do_not_specialize=["sources", "targets", "count", "groups"])
def gather_rows_by_index(
    target,
    source,
    sources,
    targets,
    count,
    groups,
    row_words: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
):
    """Do `target[targets[i]] = source[sources[i]]` for rows of `row_words` words each.

    Where `targets[i]` is below 0, neither is touched: what is on the device already must not
    cross the link. A fixed number of programs copies groups of rows in turn, since a transfer must
    leave most of the device to the computation beside it.
    """
    number = tl.program_id(0)
    programs = tl.num_programs(0)
    words = tl.arange(0, block)
    while number < groups:
        index = number * rows + tl.arange(0, rows)
        inside = index < count
        # int64: a plane is larger than 2**31 words.
        place = tl.load(targets + index, mask=inside, other=-1).to(tl.int64)
        row = tl.load(sources + index, mask=inside, other=0).to(tl.int64)
        copied = (inside & (place >= 0))[:, None] & (words < row_words)[None, :]
        moved = tl.load(source + row[:, None] * row_words + words[None, :], mask=copied)
        tl.store(target + place[:, None] * row_words + words[None, :], moved, mask=copied)
        number += programs
