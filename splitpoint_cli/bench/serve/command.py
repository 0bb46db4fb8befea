"""`splitpoint bench serve`: open-loop load on a running stack, measured at its client."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import typer

from splitpoint.config import DEFAULT_ADDRESS
from splitpoint.errors import InvalidArgument
from splitpoint.transport.tls import Identity, client_identity
from splitpoint_cli.bench.serve import options
from splitpoint_cli.bench.serve.backends import Backend
from splitpoint_cli.bench.serve.openai.backend import openai_backend
from splitpoint_cli.bench.serve.options import ServeOptions
from splitpoint_cli.bench.serve.picture import picture_of
from splitpoint_cli.bench.serve.report import details_of, facts_of_run, results_of, table_of
from splitpoint_cli.bench.serve.runs import measured
from splitpoint_cli.bench.serve.saving import read_metadata
from splitpoint_cli.bench.serve.splitpoint_backend import splitpoint_backend
from splitpoint_cli.bench.shared.ending import run_until_signal
from splitpoint_cli.bench.shared.progress import Progress
from splitpoint_cli.bench.shared.report import hand_over_report
from splitpoint_cli.options import Address, CaFile, TokenFile, takes_options
from splitpoint_cli.output import AsJson, OutputFile, err
from splitpoint_cli.plots import check_picture, save


@takes_options
def serve(
    given: ServeOptions,
    context: typer.Context,
    more_goals: options.MoreGoals = None,
    goodput: options.Goodput = None,
    tenant_tokens: options.TenantTokens = None,
    metadata: options.Metadata = None,
    address: Address = DEFAULT_ADDRESS,
    ca: CaFile = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
    output: OutputFile = None,
    png: options.Picture = None,
) -> None:
    """Send requests to a running stack at given times, and measure what its clients see.

    Options and keys of the result are those of `vllm bench serve`; ours follow them. Times count
    from the moment at which a request was due: a server that falls behind delays no later request,
    and its wait is counted.
    """
    _check_server(given.backend, context)
    if more_goals and not goodput:
        raise InvalidArgument(f"{more_goals[0]!r} belongs behind --goodput", field="goodput")
    figures = given.figures([*(goodput or ()), *(more_goals or ())])
    requests, saving, notes = given.requests(), given.saving(), read_metadata(metadata or [])
    identity = client_identity(ca=ca, token_file=token_file)
    tenants = _tenants(tenant_tokens or [], ca)
    if png is not None:
        check_picture(png)
    sampling = given.sampling()
    backend: AbstractAsyncContextManager[Backend] = (
        openai_backend(given.base_url, identity, tenants, sampling, given.model)
        if given.backend == "openai"
        else splitpoint_backend(address, identity, tenants, sampling, given.model)
    )
    found = run_until_signal(measured(backend, requests, given.max_concurrency, Progress()))
    facts = facts_of_run(
        found.backend,
        found.model,
        requests.arrivals,
        label=given.label,
        count=requests.count,
        max_concurrency=given.max_concurrency,
        metadata=notes,
    )
    report = {**facts, **results_of(found.records, figures, found.work), "seed": given.seed}
    if saving is not None:
        details = details_of(found.records) if saving.is_detailed else {}
        err.print(f"written to {saving.write({**report, **details})}", markup=False)
    if png is not None:
        save(picture_of(report, found.records), png)
    hand_over_report(report, table_of, as_json=as_json, output=output)
    if not report["completed"]:
        raise typer.Exit(1)


def _check_server(backend: str, context: typer.Context) -> None:
    """Raise InvalidArgument for an option that says where a server of the other backend is.

    Only for one that was written: $SPLITPOINT_ADDRESS is for all commands.
    """
    other, own = ("base-url", "address") if backend == "splitpoint" else ("address", "base-url")
    source = context.get_parameter_source(other.replace("-", "_"))
    if source is not None and source.name == "COMMANDLINE":
        raise InvalidArgument(
            f"--{other} is not for --backend {backend}: give --{own}", field=other.replace("-", "_")
        )


def _tenants(words: list[str], ca: str | None) -> dict[str, Identity]:
    """Return the identities of TENANT=PATH words. Raises InvalidArgument."""
    found = {}
    for word in words:
        name, _, path = word.partition("=")
        if not (name and path):
            raise InvalidArgument(f"{word!r} is not TENANT=PATH", field="tenant_token_file")
        found[name] = client_identity(ca=ca, token_file=path)
    return found
