"""Cores and NUMA nodes."""

from __future__ import annotations

from collections.abc import Collection

from splitpoint.errors import InvalidArgument
from splitpoint.host.numa import choose_node, gpu_nodes, parse_nodes
from splitpoint.host.processor import LONG, spin_count
from splitpoint_cli.checks.finding import Finding, Places, Verdict, read_text


def check_cores(
    usable: int, cpu_workers: int, places: Places, *, flags: Collection[str] = ()
) -> Finding:
    """Check the cores that this process may use; `flags` are those of cpuinfo."""
    name = "cores"
    total = len(parse_nodes(read_text(places.sys / "devices/system/cpu/online") or "")) or usable
    text = f"{usable} to use" + (f" of {total}" if total != usable else "")
    has_threads = read_text(places.sys / "devices/system/cpu/smt/active") == "1"
    if has_threads:
        text += ", two threads per core (SMT)"
    if cpu_workers > usable:
        return Finding(
            name,
            Verdict.WARNING,
            f"{text}, for {cpu_workers} CPU workers",
            f"Start fewer: --workers {usable}, or give them more cores",
        )
    if cpu_workers:
        threads = max(1, usable // cpu_workers)
        text += f"; {threads} threads for each CPU worker"
        spins = spin_count(threads=threads, workers=cpu_workers, cores=usable, flags=flags)
        if spins == LONG:
            text += ", each with a core of its own: they spin as long as OpenMP does by default"
        if has_threads:
            return Finding(
                name,
                Verdict.NOTE,
                text,
                f"Compute gains little from second threads; to try: --threads "
                f"{max(1, usable // 2 // cpu_workers)}",
            )
    elif usable < 2:
        return Finding(
            name,
            Verdict.WARNING,
            f"{text}: store, workers and scheduler share one core",
            "Give the processes at least two cores",
        )
    return Finding(name, Verdict.OK, text)


def check_compiler(command: str) -> Finding:
    """Check for the compiler of CPU workers' kernels; `command`: empty if there is none."""
    name = "C++ compiler"
    if command:
        return Finding(name, Verdict.OK, f"{command}, for the attention kernel of CPU workers")
    return Finding(
        name,
        Verdict.NOTE,
        "none: CPU workers decode by torch's operators, which takes longer with long prompts",
        "Install one: apt-get install g++",
    )


def check_numa(wish: str, places: Places) -> Finding:
    """Check the NUMA node of the arena; `wish`: the value of --numa-node."""
    name = "NUMA"
    text = read_text(places.sys / "devices/system/node/has_memory")
    if text is None:
        return Finding(
            name,
            Verdict.OK if wish == "none" else Verdict.PROBLEM,
            "this kernel does not report NUMA nodes",
            "" if wish == "none" else "Leave the placement to the kernel: --numa-node none",
        )
    nodes = parse_nodes(text)
    try:
        chosen = choose_node(wish, sys_folder=places.sys)
    except InvalidArgument as error:
        return Finding(name, Verdict.PROBLEM, error.message)
    if len(nodes) < 2:
        return Finding(name, Verdict.OK, "one node")
    gpus = gpu_nodes(places.sys)
    found = f"{len(nodes)} nodes"
    if wish == "auto" and len(gpus) > 1:
        return Finding(
            name,
            Verdict.NOTE,
            f"{found}, GPUs on {_list(gpus)}: the arena lies wherever the kernel puts it, and "
            "half of the copies cross between sockets",
            "Start one stack per node: numactl --cpunodebind=N splitpoint up --numa-node N "
            "--instance node-N, with the GPUs of node N in CUDA_VISIBLE_DEVICES",
        )
    if chosen is None:
        return Finding(name, Verdict.OK, f"{found}, the arena wherever the kernel puts it")
    if gpus and gpus != {chosen}:
        return Finding(
            name,
            Verdict.WARNING,
            f"{found}, the arena on {chosen} but GPUs on {_list(gpus)}: copies cross sockets",
            "Leave the choice to the store: --numa-node auto",
        )
    where = ", beside the GPUs" if gpus else ""
    return Finding(name, Verdict.OK, f"{found}, the arena on {chosen}{where}")


def _list(nodes: set[int]) -> str:
    return ", ".join(map(str, sorted(nodes)))
