"""A step whose layers' weights are on the host, as a list of tasks.

A step visits the layers once, for all sequences of the batch together (KVPR's column
schedule). Layers on the host cross the link in pieces, into two slots in turn. The seconds
of a task are arguments.

    FINE    W_K W_V; W_Q; X; K,V; W_O; MLP: rebuilding starts while most of the layer
            is still on the link
    COARSE  all weights of the layer as one piece, then X and K,V: the baseline

X and K,V go in between only where that cannot delay the weights: the staging memory they
wait for is empty by the time the layer's first weights arrive if the two layers before are
on the host, too. Elsewhere all four pieces go first. So FINE is never slower than COARSE,
whatever the costs: it sends the same bytes over the link with the same waits, and each
computation has its inputs no later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from splitpoint.planning.schedule import Lane, Simulation, simulate


class WeightPiece(Enum):
    """Matrices that cross the link as one; the value is their name in traces."""

    KEY_VALUE = "W_K W_V"
    QUERY = "W_Q"
    OUTPUT = "W_O"
    MLP = "MLP"
    HEAD = "head"  # a piece of the output matrix, which belongs to no layer


LAYER_PIECES = (
    WeightPiece.KEY_VALUE,
    WeightPiece.QUERY,
    WeightPiece.OUTPUT,
    WeightPiece.MLP,
)


class WeightOrder(Enum):
    """The grouping of a layer's pieces into copies; see the module's text."""

    FINE = "fine"
    COARSE = "coarse"

    @property
    def portions(self) -> tuple[tuple[WeightPiece, ...], ...]:
        """Pieces of each copy, in order."""
        if self is WeightOrder.COARSE:
            return (LAYER_PIECES,)
        return tuple((piece,) for piece in LAYER_PIECES)


class PassKind(Enum):
    """The kind of a step's task; those of the compute lane in the order they run."""

    WEIGHTS = "weights"
    SEND = "send X"
    LOAD = "load K,V"
    PROJECT = "project"  # q, k and v of the step's own tokens
    REBUILD = "rebuild"  # K and V of stored tokens, from X
    ATTEND = "attend"
    OUTPUT = "output"
    MLP = "mlp"

    @property
    def lane(self) -> Lane:
        if self is PassKind.WEIGHTS:
            return Lane.WEIGHTS_IN
        return Lane.LINK_IN if self in (PassKind.SEND, PassKind.LOAD) else Lane.COMPUTE


# The weights that each computation reads.
_READS: Mapping[PassKind, tuple[WeightPiece, ...]] = {
    PassKind.PROJECT: (WeightPiece.KEY_VALUE, WeightPiece.QUERY),
    PassKind.REBUILD: (WeightPiece.KEY_VALUE,),
    PassKind.OUTPUT: (WeightPiece.OUTPUT,),
    PassKind.MLP: (WeightPiece.MLP,),
}


@dataclass(frozen=True, slots=True)
class PassTask:
    """One copy or computation of one layer. `after`: indices of earlier tasks."""

    kind: PassKind
    layer: int
    pieces: tuple[WeightPiece, ...] = ()
    after: tuple[int, ...] = ()

    @property
    def lane(self) -> Lane:
        return self.kind.lane


@dataclass(frozen=True, slots=True)
class PassWork:
    """The work of a step in every layer.

    Attributes:
        host_layers: layers whose weights cross the link.
        rebuilds, loads: stored tokens are rebuilt from X, loaded as K,V (a streamed
            cache); both False: the cache is on the device.
        slots: layers that fit the memory for weights, the staging memory for X, and that
            for K,V, each.
        tiles: copies of X, each followed by a share of K,V.
    """

    layer_count: int
    host_layers: frozenset[int]
    rebuilds: bool = False
    loads: bool = False
    slots: int = 2
    tiles: int = 1


def pass_tasks(work: PassWork, order: WeightOrder) -> list[PassTask]:
    """Return one step's tasks in the order in which the lanes receive them."""
    builder = _Builder(work)
    for layer in range(work.layer_count):
        builder.add_layer(layer, order)
    return builder.tasks


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Seconds of one layer's tasks (of X and K,V: of one tile); a missing key means 0."""

    pieces: Mapping[WeightPiece, float]
    kinds: Mapping[PassKind, float] = field(default_factory=dict)

    def of(self, task: PassTask) -> float:
        """Return the seconds of a task."""
        if task.kind is PassKind.WEIGHTS:
            return sum(self.pieces.get(piece, 0.0) for piece in task.pieces)
        return self.kinds.get(task.kind, 0.0)


def simulate_pass(
    work: PassWork, costs: PassCosts, order: WeightOrder = WeightOrder.FINE
) -> Simulation:
    """Simulate a step that starts with empty slots."""
    return simulate(pass_tasks(work, order), costs.of)


class _Builder:
    def __init__(self, work: PassWork) -> None:
        self.tasks: list[PassTask] = []
        self._work = work
        # The last readers, oldest first, of each kind that has slots: weights, X, K,V.
        self._readers: dict[PassKind, list[int]] = {
            PassKind.WEIGHTS: [],
            PassKind.SEND: [],
            PassKind.LOAD: [],
        }

    def add_layer(self, layer: int, order: WeightOrder) -> None:
        work = self._work
        arrivals: dict[WeightPiece, int] = {}
        portions = list(order.portions) if layer in work.host_layers else []
        early = len(portions)
        if order is WeightOrder.FINE and all(
            before in work.host_layers for before in range(max(0, layer - work.slots), layer)
        ):
            early = min(early, 2)
        self._add_weights(layer, portions[:early], arrivals)
        moved = self._add_moves(layer)
        self._add_weights(layer, portions[early:], arrivals)
        self._add_computations(layer, arrivals, moved)

    def _add_weights(
        self,
        layer: int,
        portions: list[tuple[WeightPiece, ...]],
        arrivals: dict[WeightPiece, int],
    ) -> None:
        for pieces in portions:
            index = self._add(PassKind.WEIGHTS, layer, self._free(PassKind.WEIGHTS), pieces)
            arrivals.update(dict.fromkeys(pieces, index))

    def _add_moves(self, layer: int) -> dict[PassKind, list[int]]:
        """Add the copies of X and K,V of stored tokens, tile by tile."""
        wanted = {PassKind.SEND: self._work.rebuilds, PassKind.LOAD: self._work.loads}
        moved: dict[PassKind, list[int]] = {PassKind.SEND: [], PassKind.LOAD: []}
        free = {kind: self._free(kind) for kind in wanted}
        for _ in range(self._work.tiles):
            for kind, is_wanted in wanted.items():
                if is_wanted:
                    moved[kind].append(self._add(kind, layer, free[kind]))
        return moved

    def _add_computations(
        self, layer: int, arrivals: dict[WeightPiece, int], moved: dict[PassKind, list[int]]
    ) -> None:
        def add(kind: PassKind, moves: list[int]) -> int:
            needed = [arrivals[piece] for piece in _READS.get(kind, ()) if piece in arrivals]
            return self._add(kind, layer, tuple(sorted({*needed, *moves})))

        add(PassKind.PROJECT, [])
        rebuilt = [add(PassKind.REBUILD, [sent]) for sent in moved[PassKind.SEND]]
        attended = add(PassKind.ATTEND, moved[PassKind.LOAD])
        add(PassKind.OUTPUT, [])
        last = add(PassKind.MLP, [])
        # The last reader frees the slot.
        self._readers[PassKind.SEND] += rebuilt[-1:]
        self._readers[PassKind.LOAD].append(attended)
        if arrivals:
            self._readers[PassKind.WEIGHTS].append(last)

    def _free(self, kind: PassKind) -> tuple[int, ...]:
        """Return the task whose end frees the slot that is filled next, if it is in use."""
        readers = self._readers[kind]
        return (readers[-self._work.slots],) if len(readers) >= self._work.slots else ()

    def _add(
        self,
        kind: PassKind,
        layer: int,
        after: tuple[int, ...] = (),
        pieces: tuple[WeightPiece, ...] = (),
    ) -> int:
        self.tasks.append(PassTask(kind, layer, pieces, after))
        return len(self.tasks) - 1
