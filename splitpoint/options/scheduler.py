"""Options of the scheduler."""

from __future__ import annotations

from enum import StrEnum

from splitpoint.errors import InvalidArgument
from splitpoint.options.option import Option, Section
from splitpoint.options.service import COMMON, GRACE_SECONDS, MAX_MODEL_LEN
from splitpoint.options.store import DTYPE
from splitpoint.planning.plan import Objective, Residency

WORKER: Option[tuple[str, ...]] = Option(
    "worker",
    str,
    (),
    "Address of a worker; repeatable; optional with --redis, which lists workers, too.",
    unit="ADDRESS",
    is_repeatable=True,
)
MODEL: Option[str] = Option(
    "model", str, "", "Checkpoint folder, for config and tokenizer.", unit="DIR", is_required=True
)
CHAT_TEMPLATE: Option[str | None] = Option(
    "chat-template",
    str,
    None,
    "File with the chat template in Jinja's language, at most 1 MiB; absent: the model's own.",
    unit="FILE",
    is_rare=True,
)
SERVED_MODEL_NAME: Option[str | None] = Option(
    "served-model-name",
    str,
    None,
    "Name of the model for clients; several, with commas, all of which requests may use; absent: "
    "the checkpoint's.",
    unit="NAME,...",
)
QUEUE_CAPACITY: Option[int] = Option(
    "queue-capacity", int, 256, "Largest number of requests that may wait.", unit="N", least=0
)
TENANT_REQUESTS: Option[int | None] = Option(
    "tenant-requests",
    int,
    None,
    "Largest number of requests of one tenant that may run or wait; absent: no such bound.",
    unit="N",
    least=1,
    is_rare=True,
)
SERVER_KEY_FILE: Option[str | None] = Option(
    "server-key-file",
    str,
    None,
    "Secret behind the chunk keys, a file that is made if it is missing; absent: a new secret at "
    "each start, with which prefixes cached before are not found.",
    unit="PATH",
    is_rare=True,
)
RESIDENCY: Option[str] = Option(
    "residency",
    str,
    "auto",
    "Place of the cache for requests that do not choose; auto: resident if it fits.",
    choices=("auto", *(residency.value for residency in Residency)),
)
OBJECTIVE: Option[str] = Option(
    "objective",
    str,
    Objective.LATENCY.value,
    "Aim of plans: latency, least time for each request; throughput, least use of the busier "
    "one of link and device.",
    choices=tuple(objective.value for objective in Objective),
    is_rare=True,
)


class AnswerCharge(StrEnum):
    """The answer for which a request is charged at its start."""

    EXPECTED = "expected"
    WORST_CASE = "worst-case"


ANSWER_CHARGE: Option[str] = Option(
    "answer-charge",
    str,
    AnswerCharge.EXPECTED.value,
    "Answer for which a request is charged device memory: expected, from recent answers, growing "
    "with the answer; worst-case, max_tokens.",
    choices=tuple(policy.value for policy in AnswerCharge),
    is_rare=True,
)


def read_served_names(text: str | None) -> tuple[str, ...]:
    """Return the names of --served-model-name; empty if it is absent. Raises InvalidArgument."""
    if text is None:
        return ()
    names = tuple(name.strip() for name in text.split(","))
    if any(not name or len(name) > _LONGEST_NAME or not name.isprintable() for name in names):
        raise InvalidArgument(
            f"--served-model-name: a name has 1 to {_LONGEST_NAME} printable characters",
            field="served_model_name",
        )
    if len(set(names)) != len(names):
        raise InvalidArgument(
            "--served-model-name: a name is given twice", field="served_model_name"
        )
    return names


_LONGEST_NAME = 256


class Policy(StrEnum):
    """The order in which waiting requests start."""

    FIFO = "fifo"
    FAIR = "fair"
    UTILISATION = "utilisation"


POLICY: Option[str] = Option(
    "policy",
    str,
    Policy.FIFO.value,
    "Order in which waiting requests start: fifo, by arrival; fair, by the tenants' shares of "
    "device memory, then by priority; utilisation, the set with the most prompt tokens to "
    "compute that a worker's memory holds, within the tenants' shares.",
    choices=tuple(policy.value for policy in Policy),
)
POLICY_AGING_SECONDS: Option[float] = Option(
    "policy-aging-seconds",
    float,
    10.0,
    "Seconds of waiting that count as much as filling the device best, after which memory is "
    "reserved for a request (utilisation); 0: waiting does not count, and a request can starve.",
    unit="SECONDS",
    least=0,
    is_rare=True,
)
POLICY_LEAD_REQUESTS: Option[float] = Option(
    "policy-lead-requests",
    float,
    4.0,
    "Largest lead of a tenant over its share, in mean requests of weight 1, in favour of better "
    "sets and of cached prefixes (fair and utilisation).",
    unit="N",
    least=0,
    is_rare=True,
)

SECTIONS = (
    *COMMON,
    Section(
        "model and workers", (WORKER, MODEL, DTYPE, CHAT_TEMPLATE, SERVED_MODEL_NAME, MAX_MODEL_LEN)
    ),
    Section(
        "requests",
        (
            QUEUE_CAPACITY,
            TENANT_REQUESTS,
            RESIDENCY,
            OBJECTIVE,
            ANSWER_CHARGE,
            POLICY,
            POLICY_AGING_SECONDS,
            POLICY_LEAD_REQUESTS,
            GRACE_SECONDS,
            SERVER_KEY_FILE,
        ),
    ),
)
