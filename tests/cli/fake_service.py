"""A child at the supervisor's seam: it starts, prints READY and ends as its arguments say.

    python fake_service.py --behave NAME [--log FILE] [--health ADDRESS] --parent-fd N

Every life is recorded in FILE as lines "start NAME PID" and "stop NAME". Behaviours that
end in "-again" serve in their first life and show it in the later ones; "crash-6-again" in
the next 6 only. "drain" waits, once
it is to stop, until there is a file FILE.drained, and then unlinks its socket as gRPC does. "load"
says how far it is before it is ready. "wrong-input" and "no-memory" say why they end.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from splitpoint.errors import InvalidArgument, ResourceExhausted
from splitpoint.transport.statuses import failure_line


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", default="fake")
    parser.add_argument(
        "--behave",
        choices=(
            *("serve", "crash", "never-ready", "stubborn", "die-later", "parent-of-one"),
            *("crash-again", "crash-6-again", "never-ready-again", "drain", "load"),
            *("wrong-input", "no-memory"),
        ),
        default="serve",
    )
    parser.add_argument("--log", type=Path)
    parser.add_argument("--socket", help="bound, which fails when the file exists")
    parser.add_argument("--health", help="serve gRPC health at this address, as a scheduler does")
    parser.add_argument("--parent-fd", type=int, required=True)
    options = parser.parse_args()
    if options.behave.endswith("-again"):
        lives = options.log.read_text() if options.log.exists() else ""
        count = lives.count(f"start {options.name} ")
        is_over = options.behave == "crash-6-again" and count > 6
        options.behave = options.behave.split("-6")[0].removesuffix("-again")
        if not count or is_over:
            options.behave = "serve"

    def record(event: str) -> None:
        if options.log is not None:
            with options.log.open("a") as file:
                file.write(f"{event} {options.name} {os.getpid()}\n")

    stop = threading.Event()
    ignored = options.behave == "stubborn"
    signal.signal(signal.SIGTERM, (lambda *_: None) if ignored else (lambda *_: stop.set()))
    # Only the terminal sends this, and it must not reach children.
    signal.signal(signal.SIGINT, lambda *_: record("interrupted"))
    record("start")
    print("2026-01-01T00:00:00.000Z INFO fake: starting", file=sys.stderr, flush=True)
    if options.behave == "crash":
        print("2026-01-01T00:00:00.000Z ERROR fake: no luck today", file=sys.stderr, flush=True)
        return 7

    failures = {
        "wrong-input": InvalidArgument("--evict-to is above --evict-above"),
        "no-memory": ResourceExhausted("an arena of 9 TiB does not fit"),
    }
    if options.behave in failures:
        print(failure_line(failures[options.behave]), flush=True)
        return failures[options.behave].exit_code

    bound = socket.socket(socket.AF_UNIX)
    if options.socket:
        bound.bind(options.socket)
        bound.listen()

    def watch() -> None:
        while os.read(options.parent_fd, 64):
            pass
        stop.set()

    threading.Thread(target=watch, daemon=True).start()
    if options.behave == "parent-of-one":
        sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with options.log.open("a") as file:
            file.write(f"start grandchild {sleeper.pid}\n")
    if options.health:
        # Here, because most fakes serve nothing, and there are a hundred of them.
        from concurrent import futures

        import grpc
        from grpc_health.v1 import health, health_pb2, health_pb2_grpc

        server = grpc.server(futures.ThreadPoolExecutor(1))
        servicer = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        servicer.set("splitpoint.v1.InferenceService", health_pb2.HealthCheckResponse.SERVING)
        server.add_insecure_port(options.health)
        server.start()
    if options.behave == "load":
        for done in range(0, 101, 20):
            print(f"PROGRESS loading {done << 20} {100 << 20}", flush=True)
            time.sleep(0.05)
        print("a library's own words", file=sys.stderr, flush=True)
    if options.behave != "never-ready":
        print(f"READY {options.health or f'unix:/fake/{options.name}'}", flush=True)
    if options.behave == "die-later":
        stop.wait(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    # A stubborn one outlives SIGTERM, but not the end of its parent.
    stop.wait()
    if options.behave == "drain":
        while not options.log.with_suffix(".drained").exists():
            time.sleep(0.02)
        Path(options.socket).unlink(missing_ok=True)
    record("stop")
    return 0


if __name__ == "__main__":
    sys.exit(main())
