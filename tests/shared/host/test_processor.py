"""Which of a processor's flags are those of arithmetic."""

from __future__ import annotations

from splitpoint.host.processor import instruction_sets, vector_sets


def test_flags_of_arithmetic() -> None:
    x86 = "fpu sse4_2 ssse3 avx2 avx512_bf16 amx_tile fma f16c hypervisor ibpb smep sme bmi2"
    assert vector_sets(x86.split()) == set(x86.split()[:8])
    arm = "fp asimd asimdhp sve i8mm bf16 crc32 atomics dcpop"
    assert vector_sets(arm.split()) == set(arm.split()[:6])
    assert vector_sets() <= instruction_sets()
