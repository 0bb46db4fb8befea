"""What a scheduler is started with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scheduler_service.limits import Limits
from scheduler_service.policy.settings import PolicySettings
from splitpoint.chat.renderer import ChatRenderer
from splitpoint.checkpoint.text import Tokenizer
from splitpoint.discovery.redis_options import RedisOptions
from splitpoint.options.scheduler import AnswerCharge
from splitpoint.planning.plan import Objective, Residency
from splitpoint.shapes import ModelShape
from splitpoint.transport.access import Access
from splitpoint.transport.tls import PLAIN, Identity


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The one model that the scheduler serves, as its folder describes it."""

    shape: ModelShape
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int] = frozenset()
    # Renders chats. None: the model has no chat template. The scheduler closes it.
    chats: ChatRenderer | None = None
    # The form of tool calls that the chat template teaches; empty: none that is known.
    tool_call_format: str = ""
    # Files of the tokenizer, by the names that they have in a model folder.
    tokenizer_files: Mapping[str, Path] = field(default_factory=dict)
    # Further names by which requests may ask for it, besides the shape's.
    other_names: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names by which requests may ask for it."""
        return (self.shape.name, *self.other_names)


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """All settings of one scheduler."""

    model: ServedModel
    # Workers with fixed addresses; further ones are found in Redis.
    worker_addresses: Sequence[str]
    # Secret from which the salts of chunk keys are derived.
    server_key: bytes
    limits: Limits = field(default_factory=Limits)
    # For requests that name no residency. None: resident if that fits, else streamed.
    default_residency: Residency | None = None
    # What plans minimize.
    objective: Objective = Objective.LATENCY
    # The answer for which requests are charged at their start.
    answer_charge: AnswerCharge = AnswerCharge.EXPECTED
    # The order in which waiting requests start.
    policy: PolicySettings = field(default_factory=PolicySettings)
    reflection: bool = False
    # Certificate and token that the scheduler shows to clients, workers and stores.
    identity: Identity = PLAIN
    # Tokens that may call. None: every caller may.
    access: Access | None = None
    # None: use only the workers above, and the stores that they name.
    redis: RedisOptions | None = None
