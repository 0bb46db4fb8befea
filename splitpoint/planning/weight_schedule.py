"""The weights of a step whose layers lie on the host, as data: pieces, their order, their tasks.

A step visits the layers once, for all sequences of the batch together (KVPR's column
schedule). Layers on the host come over the link in pieces, into two slots in turn.
Costs are arguments; what a worker does with the tasks is not known here.

    FINE    W_K W_V; W_Q; X; K,V; W_O; MLP: rebuilding starts while most of the layer
            is still on the link
    COARSE  all weights of the layer as one piece, then X and K,V: the order to beat

X and K,V go in between only where that is free: where the staging memory they wait
for is sure to be empty by the time the layer's first weights may come, which is the case
when the two layers before are on the host too. Elsewhere all four pieces go first.
So FINE is never slower than COARSE, whatever the costs: on the link it sends the same
bytes with the same waits, and each computation finds its inputs no later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from splitpoint.planning.schedule import Lane, Simulation, simulate


class WeightPiece(Enum):
    """What of a layer comes over the link as one; the value is its name in traces."""

    KEY_VALUE = "W_K W_V"
    QUERY = "W_Q"
    OUTPUT = "W_O"
    MLP = "MLP"
    HEAD = "head"  # of the output matrix, which is no layer's


LAYER_PIECES = (
    WeightPiece.KEY_VALUE,
    WeightPiece.QUERY,
    WeightPiece.OUTPUT,
    WeightPiece.MLP,
)


class WeightOrder(Enum):
    """In which portions a layer's pieces come; see the module's text."""

    FINE = "fine"
    COARSE = "coarse"

    @property
    def portions(self) -> tuple[tuple[WeightPiece, ...], ...]:
        """Pieces that come as one, first ones first."""
        if self is WeightOrder.COARSE:
            return (LAYER_PIECES,)
        return tuple((piece,) for piece in LAYER_PIECES)


class PassKind(Enum):
    """One kind of task of a step. Those of the compute lane are in the order they run."""

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


# What of the weights each computation reads.
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
    """What a step does in every layer.

    Attributes:
        host_layers: those whose weights come over the link.
        rebuilds, loads: stored tokens are rebuilt from X, loaded as K,V (a streamed
            cache); both False: the cache is on the device.
        slots: for weights of a layer, and staging memory for X and for K,V of one, each.
        tiles: in which X comes, each with a share of K,V behind it.
    """

    layer_count: int
    host_layers: frozenset[int]
    rebuilds: bool = False
    loads: bool = False
    slots: int = 2
    tiles: int = 1


def pass_tasks(work: PassWork, order: WeightOrder) -> list[PassTask]:
    """One step's tasks in the order they are given to the lanes."""
    builder = _Builder(work)
    for layer in range(work.layer_count):
        builder.add_layer(layer, order)
    return builder.tasks


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Seconds of one layer's tasks (of X and K,V: of one tile); what is missing takes none."""

    pieces: Mapping[WeightPiece, float]
    kinds: Mapping[PassKind, float] = field(default_factory=dict)

    def of(self, task: PassTask) -> float:
        if task.kind is PassKind.WEIGHTS:
            return sum(self.pieces.get(piece, 0.0) for piece in task.pieces)
        return self.kinds.get(task.kind, 0.0)


def simulate_pass(
    work: PassWork, costs: PassCosts, order: WeightOrder = WeightOrder.FINE
) -> Simulation:
    """When each task of a step runs, from a start with empty slots."""
    return simulate(pass_tasks(work, order), costs.of)


class _Builder:
    def __init__(self, work: PassWork) -> None:
        self.tasks: list[PassTask] = []
        self._work = work
        # Last readers, oldest first, of what has slots: weights, X, K,V.
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
        """X and K,V of stored tokens, where there are any, tile by tile."""
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
        # Who comes last gives the slot back.
        self._readers[PassKind.SEND] += rebuilt[-1:]
        self._readers[PassKind.LOAD].append(attended)
        if arrivals:
            self._readers[PassKind.WEIGHTS].append(last)

    def _free(self, kind: PassKind) -> tuple[int, ...]:
        """Whose end gives back the slot that is filled next."""
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
