"""What the scheduler's policy knows of one worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from splitpoint.costs.first_token import FirstToken
from splitpoint.costs.profile import Profile
from splitpoint.planning.schedule import Schedule
from splitpoint.selection import FULL, Selection, SelectionMethod
from splitpoint.shapes import Encoding, ModelShape, Numerics, WeightFormat
from splitpoint.speculation import PLAIN, DraftMethod, Speculation

# Layout hash, and digest of the numerics. Workers of one key space can share chunks.
KeySpace = tuple[bytes, str]


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """One worker, from its GetInfo and its store's GetStats."""

    worker_id: str
    # Where the scheduler reaches it.
    address: str
    shape: ModelShape
    profile: Profile
    chunk_tokens: int
    has_activations: bool
    cache_capacity_bytes: int
    page_bytes: int
    # Pages that a streamed request occupies, whatever its length.
    streamed_page_count: int
    max_batch_size: int
    # Empty: the worker has no store, so it can neither reuse prefixes nor stream.
    kvstore_address: str = ""
    # What chunk keys depend on, and the name of the store's arena (empty: unknown).
    layout_hash: bytes = b""
    store_instance_id: bytes = b""
    # Slots of the store's arena (None: the store did not answer), and bytes of each.
    store_slot_count: int | None = None
    slot_bytes: int = 0
    # How the worker restores, its staging memory in tokens (0: unknown), tokens of one
    # prefill step (0: unknown), and the encoding of what it reads from its store.
    schedule: Schedule = Schedule.SERIAL
    staging_tokens: int = 0
    max_batched_tokens: int = 0
    encoding: Encoding = Encoding.NATIVE
    # True if requests with equal leading chunks share their pages.
    shares_pages: bool = False
    # What requests get that leave their speculation open, and the methods that it can use.
    speculation: Speculation = PLAIN
    draft_methods: frozenset[DraftMethod] = frozenset()
    # Methods of selection that it can serve, each with the dimensions of its artefacts; 0: any.
    selections: Mapping[SelectionMethod, int] = field(default_factory=dict)
    # True if it can follow structured output.
    has_structured_output: bool = False
    numerics: Numerics = Numerics.FAST
    # Digest of what decides its bits; chunk keys depend on it. Empty if they are fast.
    numerics_digest: str = ""
    weight_format: WeightFormat = WeightFormat.NATIVE

    @property
    def key_space(self) -> KeySpace:
        """What the keys of its chunks depend on besides tokens and tenant."""
        return self.layout_hash, self.numerics_digest

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit when one resident request has the whole cache."""
        return self.cache_capacity_bytes // self.page_bytes * self.chunk_tokens

    def has_columns(self, selection: Selection) -> bool:
        """Return True if the worker serves the selection's method with this many columns."""
        trained = self.selections.get(selection.method)
        return trained is not None and (not trained or selection.columns in (None, trained))

    def can_follow(self, selection: Selection) -> bool:
        """Return True if the worker can select so, and draft what the selection verifies."""
        has_drafter = not selection.verify or DraftMethod.SELF in self.draft_methods
        has_inputs = not selection.method.keeps_inputs or self.has_activations
        return has_drafter and has_inputs and self.has_columns(selection)

    def followed(self, selection: Selection) -> Selection:
        """Return what the worker is to select: FULL unless it can, and there is anything to select.

        Artefacts that were trained for a number of columns decide it.
        """
        if selection.reads_all or not self.can_follow(selection):
            return FULL
        trained = self.selections[selection.method]
        return replace(selection, columns=trained) if trained else selection

    def first_token(self) -> FirstToken:
        """Return the costs of a first token. Keep them: they are made of the whole profile."""
        return FirstToken.of(
            self.shape,
            self.profile,
            encoding=self.encoding,
            has_activations=self.has_activations,
            overlaps=self.schedule is Schedule.PIPELINED,
            piece_tokens=self.max_batched_tokens,
        )
