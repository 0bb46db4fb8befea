"""`--speculative-config`: the speculation of a worker as one JSON object with vLLM's names."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from splitpoint.errors import InvalidArgument
from splitpoint.speculation import ALIASES, PLAIN, DraftMethod, Speculation

FIELD = "speculative_config"
_FLAG = "--speculative-config"
_KEYS = ("method", "num_speculative_tokens", "prompt_lookup_min", "model")


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """The speculation of a worker.

    Attributes:
        defaults: what requests get that leave it open. With OFF, requests may still ask.
        model: checkpoint folder (or name, for `up`) of the draft model; None: no draft model.
    """

    defaults: Speculation = PLAIN
    model: str | None = None

    @property
    def text(self) -> str:
        """The JSON object that `read_speculative_config` reads back."""
        values: dict[str, Any] = {"method": self.defaults.method.value}
        if self.defaults.num_speculative_tokens is not None:
            values["num_speculative_tokens"] = self.defaults.num_speculative_tokens
        values["prompt_lookup_min"] = self.defaults.prompt_lookup_min
        if self.model is not None:
            values["model"] = self.model
        return json.dumps(values)


def read_speculative_config(
    text: str | None, draft_model: str | None = None
) -> SpeculativeConfig | None:
    """Return the configuration of `--speculative-config` and `--draft-model`; None: neither.

    A draft model without a method is method `model`.

    Raises InvalidArgument for text that is no JSON object, unknown keys, values of the wrong
    type or out of bounds, and contradictions.
    """
    if text is None and draft_model is None:
        return None
    values = {} if text is None else _object_of(text)
    unknown = sorted(values.keys() - set(_KEYS))
    if unknown:
        raise _refused(f"unknown key {unknown[0]!r}; known: {', '.join(_KEYS)}")
    model = _model_of(values.get("model"), draft_model)
    method = _method_of(values.get("method"), has_model=model is not None)
    if method is None:
        raise _refused(f"method is missing: one of {', '.join(DraftMethod)}")
    if method is DraftMethod.MODEL and model is None:
        raise _refused("method 'model' needs a draft model: give its folder as 'model'")
    numbers = {
        key: _integer(key, values[key])
        for key in ("num_speculative_tokens", "prompt_lookup_min")
        if values.get(key) is not None
    }
    try:
        return SpeculativeConfig(Speculation(method, **numbers), model)
    except InvalidArgument as error:
        raise _refused(error.message) from error


def _object_of(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:  # [[[[... nests too deeply
        raise _refused(f"not JSON: {error}") from error
    if not isinstance(values, dict):
        raise _refused('not a JSON object such as \'{"method": "suffix"}\'')
    return values


def _model_of(value: Any, draft_model: str | None) -> str | None:
    if value is None:
        return draft_model
    if not isinstance(value, str) or not value:
        raise _refused("model must be a string, the folder of a checkpoint")
    if draft_model not in (None, value):
        raise _refused(f"model is {value!r}, but --draft-model is {draft_model!r}")
    return value


def _method_of(value: Any, *, has_model: bool) -> DraftMethod | None:
    """Return the method; None if it is left open."""
    if value is None:
        return DraftMethod.MODEL if has_model else None
    try:
        return DraftMethod(value)
    except ValueError:
        known = ", ".join([*DraftMethod, *ALIASES])
        raise _refused(f"method {value!r} is not one of {known}") from None


def _integer(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _refused(f"{key} must be an integer, not {json.dumps(value)}")
    return value


def _refused(why: str) -> InvalidArgument:
    return InvalidArgument(f"{_FLAG}: {why}", field=FIELD)
