"""docs/sizing.md, as `splitpoint size --examples` prints it: known models on one H100."""

from __future__ import annotations

from splitpoint.config import format_size
from splitpoint.costs.profile import BUILT_IN_PROFILES
from splitpoint.planning.plan import Plan, RestoreMethod
from splitpoint.shapes import BUILT_IN_SHAPES, Encoding, ModelShape
from splitpoint.words import counted
from splitpoint_cli.output import seconds_text
from splitpoint_cli.planning.sizing import Load, Node, host_memory_of, size_up

# What is left of a card with 80 GB once the driver and CUDA have theirs.
DEVICE_MEMORY = 72 << 30
# Reading 15 GiB of weights from memory of 3.35 TB/s, and the launches.
_STEP_SECONDS = 6e-3
_PROFILE = "h100-pcie5"
_EXAMPLES = (
    ("llama-3.1-8b", Load(32768, 512, 256)),
    ("llama-3-8b", Load(8192, 512, 256)),
    ("opt-6.7b", Load(2048, 512, 128)),
)

_HEAD = f"""\
# Sizing

How much host memory, how many requests at once, which split: computed by `splitpoint size` from
the code that divides a worker's memory and plans its restores. A test compares this page with
what `splitpoint size --examples` prints. **The costs are those of data sheets; no GPU has
confirmed them.** Once a stack runs, `splitpoint status --json > status.json` holds what its
workers measured, and `splitpoint size --profile status.json --device-memory SIZE` counts with that.

One H100 with PCIe 5, {format_size(DEVICE_MEMORY)} of its memory for a worker, bfloat16, batches
of at most 32, and {_STEP_SECONDS * 1e3:g} ms for what a decode step does beside the cache.
`splitpoint size --model llama-3.1-8b --tokens 32768 --step-ms {_STEP_SECONDS * 1e3:g}` prints the
first row in words.

Llama-3-8B ends at 8,192 tokens; Llama-3.1-8B has the same layers, so the same bytes, and takes
32,768. OPT-6.7B ends at 2,048: no memory makes it answer longer prompts.
"""

_FOOT = """\
## Reading it

- **resident**: the whole cache on the device, brought there once. As long as one request fits,
  this is the faster way: those beyond the number wait, and a prefix comes back in the time of its
  restore.
- **streamed**: the cache stays on the host, and each step brings all of it. It is for requests
  that do not fit otherwise: tokens per second are what the link carries, however many run
  together, so more of them only share it.
- **split**: with grouped-query attention (Llama 3) activations are larger than keys and values
  (rho >= 1), so nothing is ever rebuilt from them, the store keeps none, and the split is 0. OPT
  keeps both: a token takes half as much again on the host and comes back in half the time.
- **host memory** is what `--host-memory` needs for a hundred cached prefixes of that length, with
  a tenth to spare; add the arena of each streamed request that is to run. The file system of the
  arena must have that size (`/dev/shm`; in Compose `SPLITPOINT_HOST_MEMORY`), and a worker on a GPU
  wants a memlock limit above it.
- **int8, int4** shrink host memory and link time alike, at a price in exactness
  ([compression.md](compression.md)); on the device the cache has its full size.
"""


def page() -> str:
    """docs/sizing.md."""
    lines = [_HEAD]
    lines += [
        "| model | tokens | store keeps | resident at once | streamed at once | step of one "
        "streamed | of all | arena of one streamed | prefix | restored in | host memory for 100 |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, load in _EXAMPLES:
        lines += [_line(BUILT_IN_SHAPES[name], load, encoding) for encoding in Encoding]
    lines += ["", _FOOT]
    return "\n".join(lines).rstrip() + "\n"


def _line(shape: ModelShape, load: Load, encoding: Encoding) -> str:
    node = Node(
        BUILT_IN_PROFILES[_PROFILE],
        DEVICE_MEMORY,
        encoding=encoding,
        step_compute_seconds=_STEP_SECONDS,
    )
    found = size_up(shape, node, load)
    host = host_memory_of(found, streamed_count=0, prefix_count=100)
    cells = (
        shape.name,
        f"{load.token_count:,}",
        encoding.value,
        str(found.resident_count),
        str(found.streamed_count),
        seconds_text(found.lone_step_seconds),
        seconds_text(found.step_seconds),
        format_size(found.host_request_bytes),
        f"{counted(load.cached_tokens, 'token')}, {format_size(found.prefix_bytes)}",
        restore_words(found.restore),
        format_size(host),
    )
    return f"| {' | '.join(cells)} |"


def restore_words(plan: Plan) -> str:
    """How long a restore takes, and in which way."""
    took = seconds_text(plan.predicted_restore_seconds)
    if plan.method is RestoreMethod.LOAD:
        return f"{took}, all loaded"
    whole = seconds_text(plan.predicted_load_seconds)
    if plan.method is RestoreMethod.TOKENS:
        return f"{took} ({whole} loaded): {counted(plan.recomputed_tokens, 'token')} from their ids"
    return f"{took} ({whole} loaded): split {plan.split_tokens:,} of {plan.cached_tokens:,}"
