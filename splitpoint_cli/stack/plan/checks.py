"""Checks of the options of a stack, before anything is loaded or made."""

from __future__ import annotations

from pathlib import Path

from splitpoint import config
from splitpoint.discovery.redis_options import read_redis_options
from splitpoint.errors import InvalidArgument
from splitpoint.host.processor import compiler
from splitpoint.observe.tracing import collector_url
from splitpoint.options.cpu_kernels import check_cpu_kernels, with_panels
from splitpoint.options.speculation import read_speculative_config
from splitpoint.shapes import Encoding, Numerics, WeightFormat
from splitpoint.tiers import Transfer
from splitpoint.transport.access import read_tokens
from splitpoint.transport.tls import Identity, read_identity
from splitpoint_cli.files import check_output
from splitpoint_cli.options import check_options
from splitpoint_cli.page_tokens import page_tokens_of
from splitpoint_cli.stack.options import StackOptions
from splitpoint_cli.stack.plan.places import trace_path


def check(options: StackOptions) -> Identity:
    """Check everything that needs no model and no device; return the scheduler's identity.

    Raises InvalidArgument, PermissionDenied.
    """
    config.check_listen_address(
        options.listen, has_tls=options.tls_cert is not None, has_tokens=options.tokens is not None
    )
    identity = read_identity(
        certificate=options.tls_cert, key=options.tls_key, authorities=options.tls_ca
    )
    if options.tokens is not None:
        read_tokens(options.tokens)  # before minutes of loading
    check_options(options)
    page_tokens_of(options.page_tokens)
    check_cpu_kernels(options.cpu_kernels)
    _check_numerics(options)
    _check_mooncake(options)
    read_redis_options(
        options.redis, password_file=options.redis_password_file, ca_file=options.redis_ca
    )
    if options.otlp_endpoint is not None:
        collector_url(options.otlp_endpoint)
    read_speculative_config(options.speculative_config, options.draft_model)
    return identity


def check_lanes(options: StackOptions, devices: tuple[str, ...]) -> None:
    """Raise InvalidArgument for an emulated link on a GPU, and for a trace without a place."""
    if options.link_rate is not None and any(device != "cpu" for device in devices):
        raise InvalidArgument("a link rate can only be emulated on a CPU", field="link_rate")
    if options.trace is not None:
        # Checked as given, too: `/tmp` would become `/tmp-0`.
        check_output(Path(options.trace).absolute(), "trace")
        for worker in range(len(devices)):
            check_output(trace_path(options.trace, worker), "trace")


def _check_numerics(options: StackOptions) -> None:
    """Raise InvalidArgument for a store that invariant numerics exclude."""
    encoding = Encoding(options.kv_encoding)
    if options.numerics == Numerics.INVARIANT and encoding.is_lossy:
        raise InvalidArgument(
            f"--numerics invariant needs --kv-encoding native: with {encoding.value}, what is "
            "reused differs from what was computed",
            field="numerics",
        )


def _check_mooncake(options: StackOptions) -> None:
    """Raise InvalidArgument for Mooncake beside tokens, unless its network is trusted.

    The store of a stack is private and gets no tokens, so it cannot refuse this by itself.
    """
    uses_mooncake = options.transfer == Transfer.MOONCAKE or options.tier_mooncake is not None
    if uses_mooncake and options.tokens is not None and not options.trusted_network:
        raise InvalidArgument(
            "Mooncake has neither encryption nor authentication, which --tokens would be for: "
            "give --trusted-network if no stranger reaches --transfer-interface, or leave "
            "Mooncake off (docs/tiers.md)",
            field="trusted_network",
        )


def check_weights(options: StackOptions, devices: tuple[str, ...]) -> None:
    """Raise InvalidArgument if int8 weights cannot run with these options on this host."""
    if WeightFormat(options.weights) is not WeightFormat.INT8:
        return
    if any(device != "cpu" for device in devices):
        raise InvalidArgument("--weights int8 is for CPU workers: --device cpu", field="weights")
    with_panels(options.cpu_kernels)
    if compiler() is None:
        raise InvalidArgument("--weights int8 needs a C++ compiler", field="weights")
