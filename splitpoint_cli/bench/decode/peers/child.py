"""A peer's child process: answers the benchmark's messages on standard input and output.

    python -m splitpoint_cli.bench.decode.peers.child

Run by `process` in the peer's own interpreter, which has neither this project nor torch: this
module and those it imports need the standard library, numpy and the peer's package.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import traceback
from typing import Any, TextIO

from splitpoint_cli.bench.decode.peers.messages import Load, PeerModel, Unsupported, Work, line_of


def load_model(load: Load) -> PeerModel:
    """Return the peer's model. Raises ModuleNotFoundError, Unsupported."""
    if importlib.util.find_spec(load.module) is None:
        raise ModuleNotFoundError(load.module)
    if load.peer == "vllm":
        from splitpoint_cli.bench.decode.peers.vllm_model import VllmModel, prepare

        prepare(load)
        return VllmModel(importlib.import_module(load.module), load)
    module: Any = importlib.import_module(load.module)
    if load.peer == "transformers":
        from splitpoint_cli.bench.decode.peers.transformers_model import TransformersModel

        return TransformersModel(module, load)
    if load.peer == "ctranslate2":
        from splitpoint_cli.bench.decode.peers.ctranslate2_model import CTranslate2Model

        return CTranslate2Model(module, load)
    if load.peer == "openvino":
        from splitpoint_cli.bench.decode.peers.openvino_model import OpenVinoModel

        return OpenVinoModel(module, load)
    from splitpoint_cli.bench.decode.peers.llama_cpp_model import LlamaCppModel

    return LlamaCppModel(module, load)


def serve(lines: TextIO, answers: TextIO) -> None:
    """Answer messages until there are no more."""

    def answer(text: str) -> None:
        answers.write(text)
        answers.flush()

    model = None
    for line in lines:
        fields = json.loads(line)
        try:
            if model is None:
                model = load_model(Load(**fields))
                answer(line_of({"variants": list(model.variants), "version": model.version}))
            else:
                answer(line_of(model.run(Work(**fields))))
        except ModuleNotFoundError as error:
            answer(line_of({"error": str(error), "is_missing": True}))
        except Unsupported as error:
            answer(line_of({"error": str(error), "is_missing": False}))
        except Exception as error:
            traceback.print_exc()
            answer(line_of({"error": f"{type(error).__name__}: {error}", "is_missing": False}))


def main() -> None:
    # What native code prints must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
