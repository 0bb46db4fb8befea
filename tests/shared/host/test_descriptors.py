"""Limits on open files that the kernel refuses."""

from __future__ import annotations

import resource

import pytest

from splitpoint.host.descriptors import raise_descriptor_limit


@pytest.mark.parametrize("error", [ValueError("not allowed"), OSError(1, "not permitted")])
def test_a_service_goes_on_with_the_limit_that_it_has(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        """As the kernel does when fs.nr_open was lowered below the hard limit."""
        raise error

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(resource, "setrlimit", refuse)
    raise_descriptor_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)
    assert f"stay limited to {soft}" in caplog.text
