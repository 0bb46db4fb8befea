"""What `splitpoint status` says of tenants."""

from __future__ import annotations

from splitpoint.client.answers import TenantStatus
from splitpoint_cli.request.status import tenant_lines


def test_tenants_are_named_with_what_metrics_call_them() -> None:
    tenants = [
        TenantStatus("acme", "1a2b3c4d", 2.0, 3, 1, 75.25, 5.0 * (1 << 30)),
        TenantStatus("", "unnamed", 1.0, 0, 0, 0.0, 0.0),
    ]
    assert list(tenant_lines(tenants)) == [
        "tenant acme: 3 running, 1 waiting for 75.2 s at most, weight 2, has had 5 GiB x s; "
        "metrics call it 1a2b3c4d",
        "tenant (unnamed): 0 running, 0 waiting, weight 1, has had 0 B x s; metrics "
        "call it unnamed",
    ]


def test_without_tenants_there_is_nothing_to_say() -> None:
    assert list(tenant_lines([TenantStatus("", "unnamed", 1.0, 3, 0, 0.0, 1.0)])) == []
    assert list(tenant_lines([])) == []
