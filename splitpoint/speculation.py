"""Speculative decoding as requests and workers name it: methods and their settings.

Names and meanings of the settings are vLLM's where it has them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import StrEnum

from splitpoint.errors import InvalidArgument

# Most tokens that may be drafted for one step: there are as many spare rows in half a page.
MOST_SPECULATIVE_TOKENS = 32
MOST_PROMPT_LOOKUP = 64
# Drafted tokens that one step verifies at most, for all of its sequences.
STEP_DRAFT_TOKENS = 64


class DraftMethod(StrEnum):
    """What drafts the tokens that a decode step verifies."""

    OFF = "off"
    # The worker chooses by measured acceptance and costs.
    AUTO = "auto"
    # The model itself, on the part of the cache that is on the device.
    SELF = "self"
    # The continuation of an earlier occurrence of the newest tokens.
    SUFFIX = "suffix"
    # A small model with the same vocabulary.
    MODEL = "model"

    @classmethod
    def _missing_(cls, value: object) -> DraftMethod | None:
        """Return the method that has this name in vLLM; None if there is none."""
        return ALIASES.get(value) if isinstance(value, str) else None


# vLLM's names of methods that are ours under another name.
ALIASES = {"ngram": DraftMethod.SUFFIX, "draft_model": DraftMethod.MODEL}


@dataclass(frozen=True, slots=True)
class Speculation:
    """How one request is decoded. The text does not depend on it.

    Attributes:
        num_speculative_tokens: most tokens drafted for one step, 0 to 32; 0: none. None: chosen
            by measurement.
        prompt_lookup_min: method SUFFIX: fewest tokens that must occur again, 1 to 64.
    """

    method: DraftMethod = DraftMethod.OFF
    num_speculative_tokens: int | None = None
    prompt_lookup_min: int = 2

    def __post_init__(self) -> None:
        count, least = self.num_speculative_tokens, self.prompt_lookup_min
        if count is not None and not 0 <= count <= MOST_SPECULATIVE_TOKENS:
            raise InvalidArgument(
                f"num_speculative_tokens must be in [0, {MOST_SPECULATIVE_TOKENS}], not {count}",
                field="num_speculative_tokens",
            )
        if not 1 <= least <= MOST_PROMPT_LOOKUP:
            raise InvalidArgument(
                f"prompt_lookup_min must be in [1, {MOST_PROMPT_LOOKUP}], not {least}",
                field="prompt_lookup_min",
            )

    @property
    def is_on(self) -> bool:
        """True if anything may be drafted."""
        return self.method is not DraftMethod.OFF and self.num_speculative_tokens != 0


PLAIN = Speculation()


@dataclass(frozen=True, slots=True)
class AskedSpeculation:
    """What a request says of its drafts. None: as the worker is configured.

    Raises InvalidArgument as `Speculation`.
    """

    method: DraftMethod | None = None
    num_speculative_tokens: int | None = None
    prompt_lookup_min: int | None = None

    def __post_init__(self) -> None:
        self.over(PLAIN)

    def over(self, configured: Speculation) -> Speculation:
        """Return the settings; those that are left open are the configured ones."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return replace(configured, **given)


AS_CONFIGURED = AskedSpeculation()
