"""Checks of `splitpoint up` before it starts a process: options, ports, memory, weights.

The checks are those of `splitpoint doctor`; here problems become errors. A service reports
a problem that arises later by itself, such as a port that was taken meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from splitpoint import config
from splitpoint.errors import (
    InvalidArgument,
    ResourceExhausted,
    SplitpointError,
    Unavailable,
)
from splitpoint.host.memory import memory_facts
from splitpoint_cli.checks import disk, memory, ports
from splitpoint_cli.checks.finding import Finding, Places
from splitpoint_cli.models import NamedModel
from splitpoint_cli.stack.places import arena_bytes
from splitpoint_cli.stack.plan import Stack

Say = Callable[[str, str], None]


def check_store_arguments(stack: Stack) -> None:
    """Raise InvalidArgument for arguments that the store would refuse."""
    # Loads the store's modules, which no other command needs.
    from kvstore_service.__main__ import check_arguments, parse_arguments

    _, _, *arguments = stack.store.arguments  # -m kvstore_service
    check_arguments(parse_arguments(arguments))


def check_machine(stack: Stack, say: Say) -> None:
    """Check that this machine and the checkpoint are fit for the stack; warnings go to `say`.

    Raises Unavailable (a port is taken), ResourceExhausted (memory), InvalidArgument (the disk
    tier's folder, weights, tokenizer or chat template).
    """
    from splitpoint_cli.checks import model  # loads what extras of the installation bring

    if stack.metrics:
        judge(ports.check_metrics(stack.metrics), Unavailable, say, reason="METRICS_PORT")
    has_tls = stack.identity.serves_tls
    for address in stack.listens:
        listen = ports.check_listen(address, has_tls=has_tls, has_tokens=stack.has_tokens)
        judge(listen, Unavailable, say)
    if stack.http is not None:
        judge(ports.check_free("http", stack.http, "--http"), Unavailable, say)
    if stack.tier_disk is not None:
        folder, size = stack.tier_disk
        judge(disk.check_tier_disk(folder, str(size), Places()), InvalidArgument, say)
    for finding in _memory(stack):
        judge(finding, ResourceExhausted, say)
    judge(model.check_weights(stack.model), InvalidArgument, say)
    if stack.draft is not None:
        judge(model.check_weights(stack.draft[0]), InvalidArgument, say)
    tokenizer = model.check_tokenizer(stack.model, stack.shape.vocabulary_size)
    if tokenizer.verdict == "problem":  # a model without one is served by token ids
        judge(tokenizer, InvalidArgument, say)
    if stack.chat_template is not None:  # of the model's own the scheduler warns
        judge(model.check_chat_template(stack.model, stack.chat_template), InvalidArgument, say)


def check_secret(stack: Stack, say: Say) -> None:
    """Tell `say` of chunks on the disk that no stack can find, since their secret is gone."""
    from kvstore_service.tiers.disk.folder import find_segments

    if stack.tier_disk is None or any(key.exists() for key in (stack.key, *stack.other_keys)):
        return
    folder, _ = stack.tier_disk
    if folder.exists() and list(find_segments(folder)):
        say(
            disk.NAME,
            f"{folder} has chunks, but {stack.key} is missing: they will not be found, since a "
            "new secret is made (if the file is elsewhere, stop, put it back, and start again)",
        )


def _memory(stack: Stack) -> Iterator[Finding]:
    there = arena_bytes(stack.arena)
    yield memory.check_shared_memory(
        config.SHARED_MEMORY, stack.host_memory_bytes, is_chosen=False, there_bytes=there
    )
    each = NamedModel(stack.shape, stack.model).weight_sizes(stack.weights, is_gpu=False).total
    if stack.draft is not None:
        folder, shape = stack.draft
        each += NamedModel(shape, folder).weight_sizes(is_gpu=False).total
    weights = each * stack.devices.count("cpu")
    needed = max(0, stack.host_memory_bytes - there)
    yield memory.check_memory(memory_facts(), needed, weights)


def judge(
    finding: Finding, kind: type[SplitpointError], say: Say, *, reason: str = "NOT_FIT"
) -> None:
    """Raise a problem as an error of this kind; give a warning to `say`."""
    advice = f" ({finding.advice})" if finding.advice else ""
    if finding.verdict == "problem":
        raise kind(f"{finding.found}{advice}", reason=reason)
    if finding.verdict == "warning":
        say(finding.name, f"{finding.found}{advice}")
