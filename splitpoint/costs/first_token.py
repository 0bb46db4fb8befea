"""Seconds to the first token of a request, in closed form: to compare many workers in microseconds.

The planner searches for the best split; here its formulas are solved without tiles, chunks and
delays (docs/planning.md). With K cached tokens of which D are on the device, T new ones, c and a
the link's seconds for the K, V and the X of one token in all layers, and g those of rebuilding it:

    load      c (K - D)
    split     min over l of  a l + max(g l, c (K - D - l))      max(g l, a l + c (K - D - l)) if
                                                                 copies and compute overlap
    tokens    min over m of  max(prefill(m), c (K - D - m))     only if they overlap
    TTFT      max(link's backlog + the least of these, compute's backlog) + prefill(T | K)

Every term shrinks with a faster link and a faster device, and grows with what is queued.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from splitpoint.costs.profile import Profile
from splitpoint.shapes import Encoding, ModelShape


@dataclass(frozen=True, slots=True)
class Backlog:
    """What is queued on a worker before a request: tokens to prefill, and bytes for the link."""

    new_tokens: float = 0.0
    link_bytes: float = 0.0


IDLE = Backlog()


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Costs of one worker, in seconds per token over all layers.

    Attributes:
        load: c; send: a, of X (infinite: the store holds none); rebuild: g.
        linear, context: a prefill's seconds per token, and per token and token before it.
        fixed: of a prefill whatever its length: its logits.
        piece_tokens: prompt tokens of one step; 0: a prefill is one piece.
        piece_seconds, weight_seconds: of each piece: its overhead; weights that cross the link.
        restore_seconds: of a restore, besides copies and products.
        overlaps: copies run beside compute.
    """

    load: float
    send: float
    rebuild: float
    linear: float
    context: float
    fixed: float
    piece_tokens: int
    piece_seconds: float
    weight_seconds: float
    restore_seconds: float
    link_bytes_per_second: float
    overlaps: bool

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        profile: Profile,
        *,
        encoding: Encoding = Encoding.NATIVE,
        has_activations: bool = False,
        overlaps: bool = True,
        piece_tokens: int = 0,
    ) -> FirstToken:
        """Return the costs of a model on a worker whose store keeps K, V and X so encoded."""
        link, layers, device = (
            profile.link_bytes_per_second,
            shape.layer_count,
            profile.prefill_flops_per_second,
        )
        # Layer 0's X is computed from token ids.
        sent = (layers - 1) * shape.stored_activation_bytes_per_token_layer(encoding)
        operation = profile.link_overhead_seconds + profile.operation_overhead_seconds
        return cls(
            load=shape.stored_kv_bytes_per_token(encoding) / link,
            send=sent / link if has_activations else math.inf,
            rebuild=layers * shape.rebuild_flops_per_token_layer / profile.rebuild_flops_per_second,
            linear=shape.prefill_flops_per_token / device,
            context=4 * shape.query_width * layers / device,
            fixed=2 * shape.vocabulary_size * shape.hidden_size / device,
            piece_tokens=piece_tokens,
            piece_seconds=profile.prefill_overhead_seconds,
            weight_seconds=profile.weight_seconds,
            restore_seconds=profile.restore_overhead_seconds + layers * operation,
            link_bytes_per_second=link,
            overlaps=overlaps,
        )

    def seconds(
        self,
        cached: int,
        new: int,
        *,
        device: int = 0,
        backlog: Backlog = IDLE,
        fetch_seconds: float = 0.0,
    ) -> float:
        """Return the seconds until the first token.

        Args:
            cached: tokens that are not computed anew, those on the device included.
            new: tokens to prefill, at least 1.
            device: leading tokens that are on the device.
            fetch_seconds: of copying the prefix from a tier or another host's store before.
        """
        link = backlog.link_bytes / self.link_bytes_per_second + fetch_seconds
        computes = self._pieces_seconds(backlog.new_tokens, backlog.new_tokens * self.linear)
        ready = link + self.restore(cached - device) if cached > device else fetch_seconds
        return max(ready, computes) + self.prefill(new, cached)

    def prefill(self, new: int, cached: int = 0) -> float:
        """Return the seconds of a prefill of new tokens after cached ones."""
        context = self.context * (cached + (new + 1) / 2)
        return self._pieces_seconds(new, new * (self.linear + context) + self.fixed)

    def restore(self, tokens: int) -> float:
        """Return the seconds of bringing cached tokens onto the device, in the cheapest way."""
        best = min(self.load * tokens, self._split(tokens))
        if self.overlaps:
            best = min(best, self._from_ids(tokens))
        return self.restore_seconds + best

    def _pieces_seconds(self, tokens: float, computes: float) -> float:
        pieces = max(1.0, tokens / self.piece_tokens) if self.piece_tokens else 1.0
        if not tokens:
            return 0.0
        return max(computes + pieces * self.piece_seconds, pieces * self.weight_seconds)

    def _split(self, tokens: int) -> float:
        """Return the seconds of rebuilding the first tokens from X and loading the rest."""
        if self.send >= self.load:
            return self.load * tokens
        # Where rebuilding and the link take equally long.
        shrinks = self.load - self.send if self.overlaps else self.load
        split = tokens * self.load / (self.rebuild + shrinks)
        if split < tokens:
            rebuilding = self.rebuild * split
            return rebuilding if self.overlaps else self.send * split + rebuilding
        if self.overlaps:
            return tokens * max(self.rebuild, self.send)
        return tokens * (self.send + self.rebuild)

    def _from_ids(self, tokens: int) -> float:
        """Return the seconds of prefilling the front while the back is loaded.

        The two meet at the root of `context / 2 * m^2 + (linear + load) m = load * tokens - o`,
        where o is the overhead of the first piece.
        """
        linear, half = self.linear, self.context / 2
        piece = max(self.piece_seconds, self.weight_seconds)
        wanted = self.load * tokens - piece
        if wanted <= 0:
            return self.load * tokens
        if self.piece_tokens:
            linear += piece / self.piece_tokens
        both = linear + self.load
        root = math.sqrt(both * both + 4 * half * wanted)
        # The form without cancellation, which holds for half = 0, too.
        met = 2 * wanted / (both + root)
        return self.load * (tokens - met)
