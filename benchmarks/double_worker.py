"""A worker whose model costs nothing: `python -m benchmarks.double_worker --step-ms MS ...`.

Everything else is the worker service: its gRPC server, runtime, engine, queues, pages and messages.
In place of the model's forward pass stand a sleep, as long as a step shall take, and tokens drawn
from the position alone. So what surrounds a model can be loaded beyond what this host's model could
do. All other options are those of the worker service.
"""

from __future__ import annotations

import sys
import time

from worker_service.__main__ import main as run_worker
from worker_service.engine import engine
from worker_service.engine.batch import Batch
from worker_service.engine.model_runner import ModelRunner, StepResult
from worker_service.engine.sampling import Choice, NonFiniteLogits

# Token ids of the bundled model that have text.
FIRST_TOKEN, LAST_TOKEN = 300, 4000
FLAG = "--step-ms"


class DoubleRunner(ModelRunner):
    """Chooses a token for every sequence of a batch that has computed all it has."""

    step_seconds = 0.0

    def run(self, batch: Batch) -> StepResult:
        """Sleep until the step has taken its time since it began; then choose."""
        choices: list[list[Choice] | NonFiniteLogits] = [
            [token_at(len(sequence.tokens))] if count else []
            for sequence, count in zip(batch.sequences, batch.logit_counts, strict=True)
        ]
        left = batch.started + self.step_seconds - time.perf_counter()
        if left > 0:
            time.sleep(left)
        return StepResult(batch, [], choices=choices)


def token_at(position: int) -> Choice:
    """Return the token of a place in a sequence."""
    return Choice(FIRST_TOKEN + position * 2654435761 % (LAST_TOKEN - FIRST_TOKEN))


def main() -> int:
    if FLAG in sys.argv:
        place = sys.argv.index(FLAG)
        DoubleRunner.step_seconds = float(sys.argv[place + 1]) / 1e3
        del sys.argv[place : place + 2]
    vars(engine)["ModelRunner"] = DoubleRunner
    return run_worker()


if __name__ == "__main__":
    sys.exit(main())
