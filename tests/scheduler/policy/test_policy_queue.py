"""The queue that decides which waiting request starts next: constructed cases."""

from __future__ import annotations

from policy_doubles import Device, Job, drive

from scheduler_service.policy.settings import PolicySettings
from splitpoint.options.scheduler import Policy

# (K, T) of algorithms.md and of the paper's Figure 8: a budget of 5 tokens, memory for 10.
FIGURE_8 = [Job(3, 2), Job(3, 1), Job(5, 1), Job(2, 3)]


def test_the_papers_example_takes_two_iterations_instead_of_three() -> None:
    steps = {}
    for policy in Policy:
        device = Device(pages=10, step_tokens=5, settings=PolicySettings(policy, ahead_steps=1))
        steps[policy] = drive(device, FIGURE_8)
    assert steps[Policy.FIFO] == steps[Policy.FAIR] == [[0, 1], [2], [3]]
    assert sorted(map(sorted, steps[Policy.UTILISATION])) == [[0, 3], [1, 2]]
