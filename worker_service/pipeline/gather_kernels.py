"""The Triton kernels that copy scattered slots and rows; imported only where Triton is wanted.

They read host memory that the driver registered, through its own address, so that one launch
replaces many copies. They copy words, or decode rows of them, and know no planes.
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


@triton.jit(do_not_specialize=["sources", "targets", "count", "groups"])
def decode_rows_by_index(
    target,
    source,
    sources,
    targets,
    count,
    groups,
    row_words: tl.constexpr,
    width: tl.constexpr,
    group: tl.constexpr,
    parameter_words: tl.constexpr,
    has_minimum: tl.constexpr,
    rows: tl.constexpr,
    word_block: tl.constexpr,
    block: tl.constexpr,
):
    """Do as `gather_rows_by_index` for encoded rows, and decode them to `width` elements each.

    A row is `row_words` words of 16 bits (docs/arena-format.md, section Rows), each of which is
    read once: parameters and codes are taken apart on the device. With `has_minimum` codes have
    4 bits, and each `group` elements a scale and a minimum; else codes have 8 bits.
    """
    number = tl.program_id(0)
    programs = tl.num_programs(0)
    word = tl.arange(0, word_block)
    element = tl.arange(0, block)
    if has_minimum:
        code_word = parameter_words + element // 4
        scale_word = 2 * (element // group)
    else:
        code_word = parameter_words + element // 2
        scale_word = element // group
    # Elements past the row are computed, too, and not stored.
    within = (element < width)[None, :]
    code_word = tl.broadcast_to(tl.where(element < width, code_word, 0)[None, :], (rows, block))
    scale_word = tl.broadcast_to(tl.where(element < width, scale_word, 0)[None, :], (rows, block))
    while number < groups:
        index = number * rows + tl.arange(0, rows)
        inside = index < count
        # int64: a plane is larger than 2**31 words.
        place = tl.load(targets + index, mask=inside, other=-1).to(tl.int64)
        row = tl.load(sources + index, mask=inside, other=0).to(tl.int64)
        copied = (inside & (place >= 0))[:, None]
        read = tl.load(
            source + row[:, None] * row_words + word[None, :],
            mask=copied & (word < row_words)[None, :],
            other=0,
        )
        codes = tl.gather(read, code_word, 1).to(tl.int32)
        scale = tl.gather(read, scale_word, 1).to(tl.float16, bitcast=True).to(tl.float32)
        if has_minimum:
            minimum = tl.gather(read, scale_word + 1, 1).to(tl.float16, bitcast=True)
            level = (codes >> (4 * (element % 4))[None, :]) & 15
            # The product is exact: it does not matter whether the sum is fused with it.
            value = minimum.to(tl.float32) + level.to(tl.float32) * scale
        else:
            # The lower or the upper byte, with its sign.
            level = (codes << (24 - 8 * (element % 2))[None, :]) >> 24
            value = level.to(tl.float32) * scale
        tl.store(
            target + place[:, None] * width + element[None, :],
            value.to(target.dtype.element_ty),
            mask=copied & within,
        )
        number += programs
