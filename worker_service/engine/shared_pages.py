"""Shares device pages between resident sequences that begin with equal tokens.

A sequence takes the leading chunks that are on the device, and registers each of its own
that a step left full, finite and checked. While another sequence restores or computes the
chunk that it needs next, it waits for that one instead of bringing the chunk itself.
Bookkeeping over `DevicePrefixes`; the only bytes copied are those of a partial last chunk.
"""

from __future__ import annotations

from collections.abc import Iterable

from worker_service.device.cache import DeviceCache
from worker_service.device.copies import sent
from worker_service.device.prefixes import DevicePrefixes
from worker_service.engine.sequence import Sequence, Stage


class SharedPages:
    """The device's prefixes and the sequences that use them.

    Attributes:
        prefixes: finds pages by chunk key.
    """

    def __init__(self, cache: DeviceCache) -> None:
        self.prefixes = DevicePrefixes(cache.pages, cache.layout)
        self._cache = cache
        self._chunk = cache.layout.chunk_tokens
        self._keeps_inputs = bool(cache.inputs)
        # The sequence that restores or computes a chunk that is not registered yet.
        self._bringing: dict[bytes, Sequence] = {}
        # Pages of damaged chunks that sequences still hold.
        self._tainted: set[int] = set()

    # -- take ---------------------------------------------------------------------------

    def count(self, sequence: Sequence) -> int:
        """Return how many leading chunks the sequence could take from the device now."""
        keys, vouched = self._usable_keys(sequence)
        return self.prefixes.held_count(keys, vouched=vouched)

    def in_use_count(self, sequence: Sequence) -> int:
        """Return how many of the chunks that it could take now other sequences hold."""
        keys, vouched = self._usable_keys(sequence)
        keys = keys[: self.prefixes.held_count(keys, vouched=vouched)]
        return sum(self._cache.pages.references(page) > 0 for page in self.prefixes.listed(keys))

    def take(self, sequence: Sequence) -> None:
        """Take the leading chunks that are here, and copy the beginning of the next one.

        At least the last token is left to compute. With activations kept, nothing beyond the
        store's match is taken: it could not be sealed without its X, which is not here.
        Streamed sequences take nothing, nor do those that restore all.
        """
        if not _takes_pages(sequence):
            return
        keys, vouched = self._usable_keys(sequence)
        count = self.prefixes.held_count(keys, vouched=vouched)
        for page in self.prefixes.pages_of(keys[:count]):
            self._cache.claims.share(sequence.claim, page)
            sequence.pages.append(page)
        sequence.checked_chunks = count
        sequence.device_tokens = count * self._chunk
        if count >= vouched and not self._needs_inputs(sequence):
            self._copy_beginning(sequence)
        sequence.computed = sequence.device_tokens

    def _usable_keys(self, sequence: Sequence) -> tuple[list[bytes], int]:
        """Return the keys of the chunks it may take, and how many of them the store has."""
        if not _takes_pages(sequence):
            return [], 0
        most = (len(sequence.tokens) - 1) // self._chunk
        vouched = 0
        if sequence.match is not None:
            vouched = min(most, sequence.match.cached_tokens // self._chunk)
        if self._needs_inputs(sequence):
            most = vouched
        return self._keys(sequence, most), vouched

    def _needs_inputs(self, sequence: Sequence) -> bool:
        return self._keeps_inputs and sequence.match is not None

    def _keys(self, sequence: Sequence, count: int) -> list[bytes]:
        keys = sequence.chunk_keys
        self.prefixes.extend_keys(keys, sequence.admission.salt, sequence.tokens, count)
        return keys[:count]

    def _copy_beginning(self, sequence: Sequence) -> None:
        """Copy the rows of another chunk that begins like the next one, if it has enough.

        A chunk of the store that reaches further is restored instead.
        """
        first = sequence.device_tokens
        index = first // self._chunk
        wanted = sequence.tokens[first : min(first + self._chunk, len(sequence.tokens) - 1)]
        parent = sequence.chunk_keys[index - 1] if index else b""
        found = self.prefixes.beginning_of(sequence.admission.salt, parent, wanted)
        if found is None:
            return
        match, end = sequence.match, first + found.token_count
        if match is not None and min(match.cached_tokens, len(sequence.tokens) - 1) > end:
            return
        pages = self._cache.pages
        # The page that is copied must not be evicted for its copy.
        pages.share(found.page)
        page = None
        if pages.available_count:
            page = self._cache.claims.allocate(sequence.claim)
        pages.free(found.page)
        if page is None:
            return
        for plane in (*self._cache.keys, *self._cache.values):
            plane[page].copy_(plane[found.page])
        sequence.pages.append(page)
        sequence.device_tokens += found.token_count

    # -- wait for one another -------------------------------------------------------------

    def holds_more(self, sequence: Sequence) -> bool:
        """Return True if more full chunks are here than the store had at the match."""
        match = sequence.match
        if not _takes_pages(sequence) or match is None:
            return False
        keys = self._keys(sequence, (len(sequence.tokens) - 1) // self._chunk)
        held = self.prefixes.held_count(keys, vouched=len(keys))
        return held > match.cached_tokens // self._chunk

    def must_wait(self, sequence: Sequence) -> bool:
        """Return True while another sequence brings the next chunk that could be taken."""
        if not _takes_pages(sequence):
            return False
        keys = self._keys(sequence, (len(sequence.tokens) - 1) // self._chunk)
        index = self.prefixes.held_count(keys, vouched=len(keys))
        if self._needs_inputs(sequence):
            # What is here but not in the match can be taken only once it is stored.
            index = min(index, self.count(sequence))
        for place in range(index, len(keys)):
            owner = self._bringing.get(keys[place])
            if owner is None or owner is sequence:
                return False
            if self._is_bringing(owner, place):
                return True
        return False

    def _is_bringing(self, owner: Sequence, index: int) -> bool:
        """Return True if the owner is about to make its chunk `index` usable by others."""
        if owner.stage in (Stage.LEAVING, Stage.LOOKING_UP):
            return False
        if owner.paused and owner.restoring is None:
            return False
        if index >= owner.checked_chunks:
            return True
        return self._keeps_inputs and owner.writes_back and index >= len(owner.stored)

    def announce(self, sequence: Sequence) -> None:
        """Let others wait for the chunks that the sequence restores or computes now."""
        if sequence.is_streamed:
            return
        keys = self._keys(sequence, len(sequence.tokens) // self._chunk)
        for key in keys[sequence.checked_chunks :]:
            self._bringing[key] = sequence

    def withdraw(self, sequence: Sequence) -> None:
        """Undo `announce`: the sequence gives up its pages."""
        for key in sequence.chunk_keys:
            if self._bringing.get(key) is sequence:
                del self._bringing[key]

    # -- register -------------------------------------------------------------------------

    def register(self, sequence: Sequence, end: int) -> None:
        """Register the chunks from `checked_chunks` to `end`, which are full and checked.

        A chunk that another page holds by now is read from there, and its own page freed.
        """
        if sequence.is_streamed:
            return
        keys, unsure = self._keys(sequence, end), sequence.first_unsure_chunk
        for index in range(sequence.checked_chunks, end):
            start = index * self._chunk
            sequence.pages[index] = self.prefixes.register(
                sequence.admission.salt,
                keys[index - 1] if index else b"",
                keys[index],
                sequence.tokens[start : start + self._chunk],
                sequence.page(index),
                is_sure=unsure is None or index < unsure,
            )

    # -- damage -----------------------------------------------------------------------------

    def forget(self, keys: Iterable[bytes]) -> set[int]:
        """Forget damaged chunks and all that follow them; return their pages.

        No page becomes free before it is cleared, since a damaged chunk may hold a NaN.
        """
        dropped = self.prefixes.drop(keys)
        held = {page for page in dropped if self._cache.pages.references(page)}
        self._tainted |= held
        self._clear(dropped - held)
        return dropped

    def freed(self, pages: Iterable[int]) -> None:
        """Clear those of the pages that held damaged chunks and are free now."""
        free = {
            page
            for page in self._tainted.intersection(pages)
            if not self._cache.pages.references(page)
        }
        self._tainted -= free
        self._clear(free)

    def _clear(self, pages: Iterable[int]) -> None:
        numbers = sent(sorted(pages), self._cache.device)
        if len(numbers):
            for plane in (*self._cache.keys, *self._cache.values):
                plane[numbers] = 0


def _takes_pages(sequence: Sequence) -> bool:
    """Return True if the sequence uses what the device holds of its prefix."""
    restores_all = sequence.admission.restores_all
    return not (sequence.is_streamed or restores_all or sequence.scores_prompt)
