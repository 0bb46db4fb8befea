"""`splitpoint batch` at a stack with TLS and tokens: whose token, and what it never writes."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from secured_stack import ROOT, SecuredStack, secured_stack

from splitpoint_cli.stack.child import child_environment

PROMPT = "canaryprompt = 1"


async def run(stack: SecuredStack, folder: Path, token: str) -> tuple[int | None, str, str]:
    """Run a batch with a token; return exit code, output and errors."""
    source = folder / "in.jsonl"
    body = {"model": "small-llama", "prompt": PROMPT, "max_tokens": 2, "ignore_eos": True}
    source.write_text(
        json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body})
    )
    token_file = folder / "token"
    token_file.write_text(token)
    token_file.chmod(0o600)
    environment = child_environment(
        {
            "SPLITPOINT_CERT": str(stack.certificates / "client.pem"),
            "SPLITPOINT_KEY": str(stack.certificates / "client-key.pem"),
        }
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "splitpoint_cli", "batch", str(source), str(folder / "out.jsonl")),
        *("--address", stack.scheduler, "--ca", str(stack.certificates / "ca.pem")),
        *("--token-file", str(token_file), "--json"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env=environment,
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_a_batch_shows_its_token(tmp_path: Path) -> None:
    async with secured_stack(tmp_path / "stack") as stack:
        code, out, err = await run(stack, tmp_path, "no-such-token")
        assert code == 1
        assert "UNAUTHENTICATED" in err
        assert "no-such-token" not in err
        assert not (tmp_path / "out.jsonl").read_text()
        code, out, err = await run(stack, tmp_path, stack.tokens["alice"])
        assert code == 0, err
        assert json.loads(out)["answered"] == 1
        row = json.loads((tmp_path / "out.jsonl").read_text())
        assert row["response"]["status_code"] == 200
        for log in stack.logs.values():
            assert PROMPT not in log.read_text()
