"""Whether a stack of this instance is running already, and serves."""

from __future__ import annotations

from dataclasses import dataclass

from splitpoint.client import INFERENCE_SERVICE
from splitpoint.config import reachable_address, runtime_path
from splitpoint.errors import SplitpointError
from splitpoint.transport.tls import read_identity, trusting_own_server
from splitpoint_cli.checks.finding import Finding, Verdict
from splitpoint_cli.request.probe import obstacle_of
from splitpoint_cli.stack.instance import running_process

_ANSWER_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class OwnStack:
    """A healthy stack of the instance, which itself uses the ports and the arena."""

    instance: str
    process_id: int
    address: str


def find_own_stack(
    instance: str, listen: str, *, certificate: str | None, key: str | None, ca: str | None
) -> OwnStack | None:
    """Return the stack of this name that serves at `listen`; None if there is none."""
    process_id = running_process(runtime_path(instance), seconds=0)
    if process_id is None:
        return None
    address = reachable_address(listen)
    try:
        identity = read_identity(certificate=certificate, key=key, authorities=ca)
        obstacle = obstacle_of(
            address,
            service=INFERENCE_SERVICE,
            identity=trusting_own_server(identity),
            seconds=_ANSWER_SECONDS,
        )
    except SplitpointError:  # wrong options, which are findings of other checks
        return None
    return OwnStack(instance, process_id, address) if obstacle is None else None


def check_own_stack(stack: OwnStack) -> Finding:
    return Finding(
        "instance",
        Verdict.OK,
        f"a stack of this instance is running: {stack.instance}, process {stack.process_id}, "
        f"serves at {stack.address}",
        "To start it anew: splitpoint down first; beside it: splitpoint up with another --listen "
        "port or --instance",
    )
