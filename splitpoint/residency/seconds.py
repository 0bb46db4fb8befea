"""Seconds of the pieces that each residency is made of: a start, a step, a pull.

With n sequences that decode together, each of length s, and B_kv bytes a token:

    step(n)     max(D, n F / v) + n s B_kv m      all K and V on the device
    streamed(n) a decode step that loads or rebuilds n s tokens besides (`plan_batch`)
    start       restore of the cached tokens + prefill of the new ones

D is the compute of one sequence's step, in which all weights are read; n F FLOP are those of
a prefill of n tokens with their logits; m is seconds per byte of device memory, and 0 in a
profile that has not measured it: its D has the attention in it already. Weights on the host
cross the link in every step.

Each copy and product of a streamed sequence takes o seconds of the device's host besides: a
load in each layer, and a send and a rebuild where X is stored.

A restore is predicted by `SplitCosts` with the split that the planner chooses. Knows no
requests and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitpoint.costs.profile import Profile
from splitpoint.errors import InvalidArgument
from splitpoint.planning.plan import Objective, Plan, PlanInput
from splitpoint.planning.planner import plan_batch, plan_request
from splitpoint.planning.schedule import Schedule
from splitpoint.planning.split_costs import tiles_of
from splitpoint.shapes import Encoding, ModelShape


@dataclass(frozen=True, slots=True)
class RequestLoad:
    """One request, in tokens.

    Attributes:
        prompt_tokens: all of the prompt; at least 1 of it is not cached.
        cached_tokens: the leading ones whose K and V the store holds.
        answer_tokens: generated tokens.
    """

    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("prompt_tokens", self.prompt_tokens, 1, None),
            ("answer_tokens", self.answer_tokens, 1, None),
            ("cached_tokens", self.cached_tokens, 0, self.prompt_tokens - 1),
        ):
            if value < least or (most is not None and value > most):
                allowed = f"at least {least}" if most is None else f"in [{least}, {most}]"
                raise InvalidArgument(f"{name} must be {allowed}, not {value}", field=name)

    @property
    def new_tokens(self) -> int:
        """Tokens of the prompt that are prefilled."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def mean_length(self) -> int:
        """Length of the sequence half way through its answer."""
        return self.prompt_tokens + self.answer_tokens // 2

    @property
    def step_count(self) -> int:
        """Decode steps: the prefill chooses the first token."""
        return self.answer_tokens - 1


@dataclass(frozen=True, slots=True)
class DeviceRoom:
    """How one worker brings caches onto its device, and computes.

    Attributes:
        has_activations: the store keeps X.
        staging_tokens: tokens of X that fit the staging memory; 0: no bound.
        prefill_tokens: most tokens of a prefill in one piece; 0: no bound.
        step_compute_seconds: of a decode step of one sequence without its cache traffic.
            None: the profile's, or that of reading all weights from device memory.
    """

    has_activations: bool
    chunk_tokens: int = 64
    staging_tokens: int = 0
    prefill_tokens: int = 0
    schedule: Schedule = Schedule.PIPELINED
    encoding: Encoding = Encoding.NATIVE
    objective: Objective = Objective.LATENCY
    step_compute_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise InvalidArgument("chunk_tokens must be at least 1", field="chunk_tokens")


@dataclass(frozen=True, slots=True)
class IterationSeconds:
    """Seconds of an engine's step with resident sequences, from constants of one worker.

    Attributes:
        alone: compute of a step of one sequence, in which all weights are read (D above).
        row: the products of one decoding sequence.
        flop: one FLOP of a prefill.
        piece: the overhead of a piece of a prefill.
        read: K and V of one token, read by attention.
        weights: the weights on the host, which cross the link in every step.
    """

    alone: float
    row: float
    flop: float
    piece: float
    read: float
    weights: float

    @classmethod
    def of(
        cls, shape: ModelShape, profile: Profile, step_compute_seconds: float | None = None
    ) -> IterationSeconds:
        """`step_compute_seconds`: see DeviceRoom."""
        given = step_compute_seconds
        alone = profile.step_compute_seconds if given is None else given
        if not alone:
            alone = shape.step_weight_bytes * profile.memory_seconds_per_byte
        head = 2 * shape.vocabulary_size * shape.hidden_size
        return cls(
            alone,
            (shape.prefill_flops_per_token + head) / profile.prefill_flops_per_second,
            1 / profile.prefill_flops_per_second,
            profile.prefill_overhead_seconds,
            shape.kv_bytes_per_token * profile.memory_seconds_per_byte,
            profile.weight_seconds,
        )

    def seconds(
        self, count: int, tokens: float, prefill_flops: float = 0.0, pieces: int = 0
    ) -> float:
        """Return a step in which `count` sequences of `tokens` tokens together decode.

        It computes `pieces` of prefills of this many FLOP besides: the weights are read once.
        """
        return max(self.compute_seconds(count, tokens, prefill_flops, pieces), self.weights)

    def compute_seconds(
        self, count: int, tokens: float, prefill_flops: float = 0.0, pieces: int = 0
    ) -> float:
        """Return the part of such a step in which the device computes."""
        products = count * self.row + pieces * self.piece + prefill_flops * self.flop
        return max(self.alone, products) + tokens * self.read


@dataclass(frozen=True, slots=True)
class PieceSeconds:
    """Predicted seconds of pieces of work on one device."""

    shape: ModelShape
    profile: Profile
    room: DeviceRoom

    # -- steps ---------------------------------------------------------------------

    def step(self, count: int, length: int) -> float:
        """Return a decode step of `count` resident sequences of this length."""
        return self.iteration.seconds(count, count * length)

    @property
    def iteration(self) -> IterationSeconds:
        """The constants of a step of this device."""
        return IterationSeconds.of(self.shape, self.profile, self.room.step_compute_seconds)

    def streamed_step(
        self, count: int, length: int, *, resident_tokens: int = 0, resident_count: int = 0
    ) -> float:
        """Return a decode step of `count` streamed sequences of this length.

        Args:
            resident_tokens: tokens, of all of them together, that stay on the device.
            resident_count: resident sequences that decode in the same step.
        """
        sequences = count + resident_count
        return plan_batch(
            self.shape,
            self.profile,
            [length] * count,
            has_activations=self.room.has_activations,
            schedule=self.room.schedule,
            chunk_tokens=self.room.chunk_tokens,
            staging_tokens=self.room.staging_tokens,
            encoding=self.room.encoding,
            resident_tokens=resident_tokens,
            step_compute_seconds=self.iteration.compute_seconds(sequences, sequences * length)
            + count * self._handed_operations * self.profile.operation_overhead_seconds,
        ).step_seconds

    # -- starts and restores -------------------------------------------------------

    def start(self, load: RequestLoad) -> float:
        """Return the seconds until a resident sequence has its first token."""
        prefill = self.prefill(load.new_tokens, load.cached_tokens)
        return self.restore(load.cached_tokens) + prefill

    def streamed_start(self, load: RequestLoad) -> float:
        """Return the seconds until a streamed sequence has its first token.

        Each piece of a prefill pulls the cached prefix once.
        """
        pieces = tiles_of(load.new_tokens, self.room.prefill_tokens)
        prefill = self.prefill(load.new_tokens, load.cached_tokens)
        return max(prefill, pieces * self.restore(load.cached_tokens))

    def restore(self, tokens: int) -> float:
        """Return a restore of this many tokens by the way that the planner chooses; 0 for none."""
        return self.restore_plan(tokens).predicted_restore_seconds if tokens > 0 else 0.0

    def restore_plan(self, tokens: int) -> Plan:
        """Return the plan of a resident prefix of this many tokens."""
        room = self.room
        return plan_request(
            self.shape,
            self.profile,
            PlanInput(
                cached_tokens=tokens,
                new_tokens=1,
                has_activations=room.has_activations,
                schedule=room.schedule,
                chunk_tokens=room.chunk_tokens,
                staging_tokens=room.staging_tokens,
                prefill_tokens=room.prefill_tokens,
                encoding=room.encoding,
                objective=Objective.LATENCY,
            ),
        )

    def prefill(self, new_tokens: int, cached_tokens: int) -> float:
        """Return a prefill of new tokens after the cached ones."""
        pieces = tiles_of(new_tokens, self.room.prefill_tokens)
        return self.profile.prefill_seconds(
            self.shape.prefill_flops(new_tokens, cached_tokens), pieces
        )

    # -- inside --------------------------------------------------------------------

    @property
    def _handed_operations(self) -> int:
        """Copies and products of one streamed sequence in a step, at least."""
        layers = self.shape.layer_count
        return 3 * layers - 1 if self.room.has_activations else layers
