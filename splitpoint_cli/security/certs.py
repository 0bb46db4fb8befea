"""`splitpoint certs`: a development certificate authority, and certificates of it.

For one team on a few machines. Larger houses have an authority of their own,
whose files every service takes as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from splitpoint_cli.output import out


def certs(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder for the files; made if it is missing.")
    ],
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="Name or address by which clients reach the server, besides localhost; "
            "repeatable.",
            metavar="NAME",
        ),
    ] = None,
    days: Annotated[
        int, typer.Option(help="Days for which the certificates are valid.", min=1)
    ] = 365,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
) -> None:
    """Make a development CA, a server certificate and a client certificate.

    Keep ca-key.pem off the servers: its holder can impersonate every client and server.
    """
    from splitpoint_cli.security.authority import (
        make_certificates,  # no other command loads what it needs
    )

    for path in make_certificates(folder, host or (), days=days, force=force):
        out.print(str(path), markup=False)
    at = folder.absolute()
    out.print(
        "\nServe with them (--tls-ca also demands a client certificate; leave it out to rely on "
        "tokens alone):\n"
        "  splitpoint token --file tokens.toml --name me --role admin --out admin.token\n"
        f"  splitpoint up --listen 0.0.0.0:50050 --tokens tokens.toml \\\n"
        f"    --tls-cert {at}/server.pem --tls-key {at}/server-key.pem --tls-ca {at}/ca.pem\n"
        "Call it:\n"
        f"  export SPLITPOINT_TOKEN_FILE=admin.token SPLITPOINT_CA={at}/ca.pem\n"
        f"  export SPLITPOINT_CERT={at}/client.pem SPLITPOINT_KEY={at}/client-key.pem\n"
        f"  splitpoint status --address {(host or ['localhost'])[0]}:50050",
        markup=False,
    )
