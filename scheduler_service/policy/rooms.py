"""What one worker has been given and has not computed yet."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_service.policy.waiting import Need


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Sizes of a worker.

    Attributes:
        memory_bytes: its cache.
        page_bytes: bytes of one page.
        step_tokens: prompt tokens of one step; 0: unknown, so nothing is held back.
    """

    memory_bytes: int
    page_bytes: int
    step_tokens: int = 0


class WorkerRoom:
    """Prefill work and restores that are bound to one worker, by arrival of the request."""

    __slots__ = ("_new_tokens", "_restoring", "limits", "new_tokens", "restoring_bytes")

    def __init__(self, limits: WorkerLimits) -> None:
        self.limits = limits
        # Tokens that are bound and not prefilled yet.
        self.new_tokens = 0
        # Bytes of link-bound requests that have no first token yet.
        self.restoring_bytes = 0
        self._new_tokens: dict[int, int] = {}
        self._restoring: dict[int, int] = {}

    def token_room(self, ahead_steps: float) -> float:
        """Return how many new tokens may still be bound; at most 0: none."""
        step = self.limits.step_tokens
        return ahead_steps * step - self.new_tokens if step else float("inf")

    def may_bind(self, need: Need, ahead_steps: float, restoring_share: float) -> bool:
        """Return True unless enough is bound already. One request is always let through."""
        if self._new_tokens and self.token_room(ahead_steps) <= 0:
            return False
        if not need.is_link_bound or not self._restoring:
            return True
        most = restoring_share * self.limits.memory_bytes
        return self.restoring_bytes + need.link_bytes <= most

    def bind(self, arrival: int, need: Need) -> None:
        self._new_tokens[arrival] = need.new_tokens
        self.new_tokens += need.new_tokens
        if need.is_link_bound:
            self._restoring[arrival] = need.link_bytes
            self.restoring_bytes += need.link_bytes

    def computed(self, token_count: int) -> None:
        """Note that a step prefilled so many tokens, of the earliest requests first."""
        for arrival, tokens in self._new_tokens.items():
            if token_count <= 0:
                break
            done = min(tokens, token_count)
            self._new_tokens[arrival] -= done
            self.new_tokens -= done
            token_count -= done

    def prefilled(self, arrival: int) -> bool:
        """Note a request's first token, or its end. Return True if it was not noted before."""
        tokens = self._new_tokens.pop(arrival, None)
        self.restoring_bytes -= self._restoring.pop(arrival, 0)
        self.new_tokens -= tokens or 0
        return tokens is not None

    def check_integrity(self) -> list[str]:
        """Return one line per violated invariant."""
        problems = []
        if self.new_tokens != sum(self._new_tokens.values()):
            problems.append(f"{self.new_tokens} unprefilled tokens are miscounted")
        if self.restoring_bytes != sum(self._restoring.values()):
            problems.append(f"{self.restoring_bytes} restoring bytes are miscounted")
        return problems
