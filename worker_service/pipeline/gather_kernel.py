"""The Triton kernel that copies scattered slots; imported only where Triton is wanted.

It reads host memory that the driver registered, through its own address, so that one
launch replaces many copies. It copies words and knows no planes.
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
