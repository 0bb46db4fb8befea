"""Sampling values that every component refuses: the field that the error names, and the values.

The ids are outside every vocabulary, so that the same table serves any model.
"""

from __future__ import annotations

import math
from typing import Any

FOREIGN_ID = 1 << 20
BAD_SAMPLING: list[tuple[str, dict[str, Any]]] = [
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": 2**31 - 1}),
    ("temperature", {"temperature": math.nan}),
    ("temperature", {"temperature": math.inf}),
    ("temperature", {"temperature": -0.1}),
    ("top_p", {"top_p": 0.0}),
    ("top_p", {"top_p": 1.01}),
    ("top_p", {"top_p": math.nan}),
    ("top_k", {"top_k": -2}),
    ("min_p", {"min_p": 1.5}),
    ("min_p", {"min_p": math.nan}),
    ("presence_penalty", {"presence_penalty": 2.5}),
    ("frequency_penalty", {"frequency_penalty": -math.inf}),
    ("repetition_penalty", {"repetition_penalty": 0.0}),
    ("repetition_penalty", {"repetition_penalty": math.inf}),
    ("repetition_penalty", {"repetition_penalty": 1e-300}),
    ("repetition_penalty", {"repetition_penalty": 1e300}),
    (f"logit_bias[{FOREIGN_ID}]", {"logit_bias": {FOREIGN_ID: 1.0}}),
    ("logit_bias[-1]", {"logit_bias": {-1: 1.0}}),
    ("logit_bias[5]", {"logit_bias": {5: 100.5}}),
    ("logit_bias[5]", {"logit_bias": {5: math.nan}}),
    ("logit_bias", {"logit_bias": dict.fromkeys(range(1025), 0.0)}),
    ("stop", {"stop": ["x"] * 17}),
    ("stop[1]", {"stop": ["x", "y" * 257]}),
    ("stop[0]", {"stop": ["ü" * 129]}),
    ("stop[0]", {"stop": [""]}),
    ("bad_words", {"bad_words": ["x"] * 129}),
    ("bad_words[1]", {"bad_words": ["x", "y" * 257]}),
    ("bad_words[0]", {"bad_words": [""]}),
    ("allowed_token_ids[1]", {"allowed_token_ids": [1, FOREIGN_ID]}),
    ("stop_token_ids", {"stop_token_ids": [1] * 65}),
    ("stop_token_ids[1]", {"stop_token_ids": [1, FOREIGN_ID]}),
    ("min_tokens", {"min_tokens": -1}),
    ("logprobs", {"logprobs": 21}),
    ("logprobs", {"logprobs": -1}),
    ("prompt_logprobs", {"prompt_logprobs": 21}),
    ("prompt_logprobs", {"prompt_logprobs": -2}),
]
