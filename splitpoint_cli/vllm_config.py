"""`splitpoint vllm-config`: what `vllm serve --kv-transfer-config` takes to use a store.

Knows the names that vLLM and the connector read, and neither of them: it runs with a client's
installation alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from splitpoint.config import DEFAULT_STORE_ADDRESS, check_address, parse_rate
from splitpoint.errors import InvalidArgument
from splitpoint.transport.tls import read_identity


def vllm_config(
    store: Annotated[
        str,
        typer.Option(
            help="Address of the store: host:port or unix:/path, on the host of the engine.",
            metavar="ADDRESS",
        ),
    ] = DEFAULT_STORE_ADDRESS,
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            help="Authority (PEM) of the store's certificate; turns TLS on; absent: no TLS.",
            metavar="PATH",
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            help="Certificate (PEM) that the engine shows to the store; absent: none.",
            metavar="PATH",
        ),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option(
            help="Private key of the certificate, a file of mode 0600; absent: none.",
            metavar="PATH",
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="Token (of a worker) that the engine shows to a store with --tokens, a file of "
            "mode 0600; absent: none.",
            metavar="PATH",
        ),
    ] = None,
    lookup_seconds: Annotated[
        float | None,
        typer.Option(
            help="Seconds that a request waits for the store's answer before the engine computes "
            "its prompt; absent: 0.15.",
            metavar="SECONDS",
        ),
    ] = None,
    link_rate: Annotated[
        str | None,
        typer.Option(
            help="Emulate a link of this many bytes per second to the pages; absent: none.",
            metavar="RATE",
        ),
    ] = None,
) -> None:
    """Print the JSON with which vLLM uses a store, in one line.

    It is the value of vLLM's --kv-transfer-config, the same for every model and engine: pages of
    other models, versions and layouts are never mixed.
    """
    print(
        json.dumps(
            transfer_config(
                store,
                tls_ca=tls_ca,
                tls_cert=tls_cert,
                tls_key=tls_key,
                token_file=token_file,
                lookup_seconds=lookup_seconds,
                link_rate=link_rate,
            ),
            separators=(",", ":"),
            ensure_ascii=False,
        )
    )


def transfer_config(
    store: str = DEFAULT_STORE_ADDRESS,
    *,
    tls_ca: Path | None = None,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    token_file: Path | None = None,
    lookup_seconds: float | None = None,
    link_rate: str | None = None,
) -> dict[str, Any]:
    """Return vLLM's KVTransferConfig as an object. Raises InvalidArgument, PermissionDenied."""
    if tls_ca is None and tls_cert is not None:
        raise InvalidArgument(
            "--tls-cert needs --tls-ca: without it the engine uses no TLS", field="tls-ca"
        )
    # That they can be used, not what is in them: vLLM's processes read the files.
    read_identity(certificate=tls_cert, key=tls_key, authorities=tls_ca, token_file=token_file)
    if lookup_seconds is not None and not 0 < lookup_seconds <= 60:
        raise InvalidArgument(
            f"--lookup-seconds is above 0 and at most 60, not {lookup_seconds:g}",
            field="lookup-seconds",
        )
    given = {
        "store": check_address(store, field="store"),
        "tls_ca": _absolute(tls_ca),
        "tls_certificate": _absolute(tls_cert),
        "tls_key": _absolute(tls_key),
        "token_file": _absolute(token_file),
        "lookup_seconds": lookup_seconds,
        "link_rate": None if link_rate is None else parse_rate(link_rate, field="link-rate"),
    }
    return {
        "kv_connector": "SplitpointConnector",
        "kv_connector_module_path": "splitpoint_vllm.connector",
        "kv_role": "kv_both",
        # With vLLM's own default a request whose load failed would end with an error.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "SplitpointSpec",
            "spec_module_path": "splitpoint_vllm.spec",
            **{name: value for name, value in given.items() if value is not None},
        },
    }


def _absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())
