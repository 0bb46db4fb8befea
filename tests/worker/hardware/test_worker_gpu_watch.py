"""A GPU that is asked again and again: absent fields, counters, losses; by a fake clock."""

from __future__ import annotations

import logging
import random
from itertools import pairwise

import pynvml
import pytest
from nvml_double import UUID_A, Card, NvmlDouble, Slice

from splitpoint.observe.meters import Reading
from splitpoint.observe.metrics import (
    GPU_ENERGY_JOULES,
    GPU_FIELD_SUPPORTED,
    GPU_MEMORY_BYTES,
    GPU_PCIE_BYTES,
    GPU_PCIE_GENERATION,
    GPU_POWER_WATTS,
    GPU_UP,
    GPU_UTILIZATION,
    LINK_CEILING,
    Kind,
    Metric,
    all_metrics,
)
from worker_service.hardware.gpu import LONGEST_PAUSE_SECONDS, STALE_SECONDS, GpuWatch
from worker_service.hardware.nvml import PCIE_TX_BYTES, GpuIdentity, open_gpu

GPU_METRICS = {metric for metric in all_metrics() if metric.name.startswith("splitpoint_gpu_")}
WRAP = 1 << 32
LOST = pynvml.NVML_ERROR_GPU_IS_LOST
# Which question asks for a field's metrics.
FUNCTIONS = {
    "pcie_link": "nvmlDeviceGetMaxPcieLinkWidth",
    "pcie_bytes": "nvmlDeviceGetFieldValues",
    "power": "nvmlDeviceGetPowerUsage",
    "power_limit": "nvmlDeviceGetEnforcedPowerLimit",
    "power_default_limit": "nvmlDeviceGetPowerManagementDefaultLimit",
    "energy": "nvmlDeviceGetTotalEnergyConsumption",
    "utilization": "nvmlDeviceGetUtilizationRates",
    "memory": "nvmlDeviceGetMemoryInfo",
    "clocks": "nvmlDeviceGetClockInfo",
    "temperature": "nvmlDeviceGetTemperature",
}


class Bench:
    """A card, its watch, and a clock that only moves when it is told to."""

    def __init__(self, card: Card | None = None, slices: list[Slice] | None = None) -> None:
        self.now = 1000.0
        self.card = card if card is not None else Card()
        self.double = NvmlDouble([self.card], slices or [])
        uuid = slices[0].uuid if slices else self.card.uuid
        self.watch = GpuWatch(lambda: open_gpu(self.double, GpuIdentity(uuid)), lambda: self.now)

    def step(self) -> float:
        """One step, and the clock goes on to where the next one is due."""
        wait = self.watch.step()
        self.now += wait
        return wait

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.step()

    def readings(self) -> dict[tuple[Metric, tuple[str, ...]], float]:
        told: list[Reading] = list(self.watch.sample.readings(self.now))
        values = {(reading.metric, reading.labels): reading.value for reading in told}
        assert len(values) == len(told), "a value was told twice"
        return values

    def value(self, metric: Metric, *labels: str) -> float | None:
        return self.readings().get((metric, labels))

    def message(self) -> str:
        return self.watch.sample.message_at(self.now)


def test_a_gpu_that_tells_everything() -> None:
    bench = Bench()
    bench.step()
    told = {metric for metric, _ in bench.readings()}
    assert told == GPU_METRICS | {LINK_CEILING}
    assert bench.value(GPU_UP) == 1
    assert bench.value(LINK_CEILING) == pytest.approx(63.015e9, rel=1e-3)
    assert bench.value(GPU_PCIE_GENERATION, "current") == 1
    assert bench.value(GPU_PCIE_GENERATION, "max") == 5
    assert bench.value(GPU_UTILIZATION) == 0.87
    # Totals begin with the worker, whatever the driver's counters say.
    assert bench.value(GPU_ENERGY_JOULES) == bench.value(GPU_PCIE_BYTES, "rx") == 0
    assert bench.message() == ""


def test_totals_count_from_the_start() -> None:
    bench = Bench(Card(rx_bytes=5 << 40, tx_bytes=6 << 40))
    bench.step()
    bench.card.rx_bytes += 1_000_000
    bench.card.tx_bytes += 3_000
    bench.card.millijoules += 450_000
    bench.run(1.1)
    assert bench.value(GPU_PCIE_BYTES, "rx") == 1_000_000
    assert bench.value(GPU_PCIE_BYTES, "tx") == 3_000
    assert bench.value(GPU_ENERGY_JOULES) == 450


@pytest.mark.parametrize("field", FUNCTIONS)
@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION])
def test_a_field_that_is_not_told_is_absent_with_its_reason(
    field: str, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    bench = Bench(Card(errors={FUNCTIONS[field]: code}))
    whole = Bench()
    whole.step()
    bench.run(5)
    reason = str(pynvml.NVMLError(code))
    assert bench.message() == f"{field}: NVML: {reason}"
    assert bench.value(GPU_FIELD_SUPPORTED, field) == 0
    assert bench.value(GPU_UP) == 1
    missing = set(whole.readings()) - set(bench.readings())
    assert missing
    assert all(
        labels or metric not in {m for m, _ in bench.readings()} for metric, labels in missing
    )
    others = {key for key in whole.readings() if key[0] is GPU_FIELD_SUPPORTED}
    expected = {(GPU_FIELD_SUPPORTED, ("link_ceiling",))} if field == "pcie_link" else set()
    assert others - set(bench.readings()) == expected
    # Asked once, said once.
    assert bench.double.calls[FUNCTIONS[field]] == 1
    assert sum(reason in record.message for record in caplog.records) == 1


def test_a_gpu_from_before_energy_counters() -> None:
    bench = Bench(
        Card(errors={FUNCTIONS["energy"]: pynvml.NVML_ERROR_NOT_SUPPORTED}, max_generation=3)
    )
    bench.run(3)
    assert bench.value(GPU_ENERGY_JOULES) is None
    assert bench.value(GPU_POWER_WATTS) == 450  # and nothing is made up from it
    assert bench.value(LINK_CEILING) == pytest.approx(15.754e9, rel=1e-3)


def test_one_direction_that_is_not_told_leaves_out_both() -> None:
    bench = Bench(Card(field_errors={PCIE_TX_BYTES: pynvml.NVML_ERROR_NOT_SUPPORTED}))
    bench.step()
    assert bench.value(GPU_PCIE_BYTES, "rx") is None
    assert bench.value(GPU_FIELD_SUPPORTED, "pcie_bytes") == 0
    assert bench.step() == 1, "what is not there is not looked at often"


def test_a_failure_that_passes() -> None:
    bench = Bench()
    bench.step()
    bench.card.errors[FUNCTIONS["power"]] = pynvml.NVML_ERROR_UNKNOWN
    bench.run(1.1)
    assert (bench.value(GPU_POWER_WATTS), bench.value(GPU_FIELD_SUPPORTED, "power")) == (None, 0)
    assert "power: NVML: Unknown Error" in bench.message()
    bench.card.errors.clear()
    bench.run(1.1)
    assert (bench.value(GPU_POWER_WATTS), bench.value(GPU_FIELD_SUPPORTED, "power")) == (450, 1)


def test_a_generation_of_the_future_has_no_ceiling_but_all_else() -> None:
    bench = Bench(Card(max_generation=9))
    bench.step()
    assert bench.value(LINK_CEILING) is None
    assert bench.value(GPU_PCIE_GENERATION, "max") == 9
    assert "generation 9" in bench.message()
    assert bench.value(GPU_PCIE_BYTES, "rx") == 0


# -- counters ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value_type",
    [pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG],
)
@pytest.mark.parametrize("generation", [3, 4, 5, 6])
def test_a_full_link_on_a_counter_of_32_bits(value_type: int, generation: int) -> None:
    """Read often enough that no wrap is missed, and not more often."""
    card = Card(rx_bytes=WRAP - 1000, counter_bits=32, value_type=value_type)
    card.max_generation = generation
    bench = Bench(card)
    bench.step()
    ceiling = bench.value(LINK_CEILING)
    assert ceiling is not None
    began, generator = card.rx_bytes, random.Random(generation)
    for _ in range(500):
        before = bench.now
        bench.step()
        # The reading was made before the clock went on; what is sent now shows at the next.
        card.rx_bytes += int(generator.uniform(0.5, 0.93) * ceiling * (bench.now - before))
        card.tx_bytes += 1000
    bench.watch.step()
    assert bench.value(GPU_PCIE_BYTES, "rx") == card.rx_bytes - began
    assert bench.value(GPU_PCIE_BYTES, "tx") == 500 * 1000
    assert card.rx_bytes - began > 50 * WRAP
    assert WRAP / ceiling / 2.1 < bench.now - before < WRAP / ceiling / 1.9


def test_a_counter_of_64_bits_is_read_once_a_second_and_wraps() -> None:
    card = Card(rx_bytes=(1 << 64) - 500, tx_bytes=1 << 40)
    bench = Bench(card)
    bench.step()
    assert bench.step() == 1
    card.rx_bytes += 30_000_000_000
    bench.run(1.5)
    assert bench.value(GPU_PCIE_BYTES, "rx") == 30_000_000_000


def test_one_wide_counter_shows_that_the_other_one_is() -> None:
    card = Card(rx_bytes=1 << 40, tx_bytes=100)
    bench = Bench(card)
    bench.step()
    assert bench.step() == 1
    card.tx_bytes = 3
    bench.run(1.5)
    assert bench.value(GPU_PCIE_BYTES, "tx") == 0, "a reset, and no wrap at 32 bits"


def test_a_reset_is_a_new_beginning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    card = Card(rx_bytes=7 << 40, tx_bytes=7 << 40)
    bench = Bench(card)
    bench.step()
    card.rx_bytes += 5_000
    card.millijoules += 2_000
    bench.run(1.5)
    card.rx_bytes, card.tx_bytes, card.millijoules = 17, 1, 12
    bench.run(1.5)
    assert bench.value(GPU_PCIE_BYTES, "rx") == 5_000
    assert bench.value(GPU_ENERGY_JOULES) == 2
    card.rx_bytes += 100
    card.millijoules += 1_000
    bench.run(1.5)
    assert bench.value(GPU_PCIE_BYTES, "rx") == 5_100
    assert bench.value(GPU_ENERGY_JOULES) == 3
    assert sum("began anew" in record.message for record in caplog.records) == 1


def test_an_implausible_jump_counts_for_nothing() -> None:
    card = Card(rx_bytes=7 << 40, tx_bytes=7 << 40)
    bench = Bench(card)
    bench.step()
    card.rx_bytes += 1 << 50
    card.millijoules += 1 << 50
    bench.run(1.5)
    assert bench.value(GPU_PCIE_BYTES, "rx") == 0
    assert bench.value(GPU_ENERGY_JOULES) == 0


def test_totals_never_shrink_whatever_the_counters_do() -> None:
    generator = random.Random(5)
    card = Card(counter_bits=32)
    bench = Bench(card)
    totals = []
    for _ in range(3000):
        match generator.randrange(12):
            case 0:
                card.rx_bytes, card.millijoules = generator.randrange(WRAP), 0
            case 1:
                card.counter_bits = generator.choice([32, 64])
            case 2:
                bench.double.failing = generator.choice([None, None, LOST])
            case _:
                card.rx_bytes += generator.randrange(1 << 30)
                card.millijoules += generator.randrange(1000)
        before = bench.now
        bench.step()
        if (total := bench.value(GPU_PCIE_BYTES, "rx")) is not None:
            totals.append((total, bench.now - before))
    assert len(totals) > 2000
    assert all(later >= earlier for (earlier, _), (later, _) in pairwise(totals))
    # And no step ever counts more than a full link could have carried.
    assert all(b - a <= 63.1e9 * (seconds + 0.1) for (a, seconds), (b, _) in pairwise(totals))


# -- losses -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code", [LOST, pynvml.NVML_ERROR_RESET_REQUIRED, pynvml.NVML_ERROR_UNKNOWN]
)
def test_lost_and_back(code: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    card = Card(rx_bytes=7 << 40, tx_bytes=7 << 40)
    bench = Bench(card)
    bench.step()
    card.rx_bytes += 5_000
    bench.run(1.5)
    bench.double.failing = code
    bench.run(60)
    assert bench.value(GPU_UP) == 0
    assert bench.value(GPU_POWER_WATTS) is None
    assert bench.value(GPU_MEMORY_BYTES, "used") is None
    # What was counted stays true, and rates over it are 0 and not absent.
    assert bench.value(GPU_PCIE_BYTES, "rx") == 5_000
    assert bench.value(LINK_CEILING) is not None
    assert bench.message() == f"NVML: {pynvml.NVMLError(code)}"
    assert bench.double.initialised == 0, "a driver that is gone is let go"
    attempts = bench.double.calls["nvmlInit"]
    assert 4 <= attempts <= 10, "with pauses that grow"
    # A driver that was loaded anew counts from 0.
    bench.double.failing, card.rx_bytes, card.tx_bytes = None, 9 << 40, 0
    bench.run(LONGEST_PAUSE_SECONDS + 1)
    assert bench.value(GPU_UP) == 1
    assert bench.value(GPU_PCIE_BYTES, "rx") == 5_000
    card.rx_bytes += 70
    bench.run(1.5)
    assert bench.value(GPU_PCIE_BYTES, "rx") == 5_070
    assert bench.message() == ""
    said = [record.message for record in caplog.records]
    assert sum("no metrics of the GPU" in text for text in said) == 1
    assert sum("answers again" in text for text in said) == 1


def test_without_the_library_it_says_so_once_and_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    bench.double.has_library = False
    bench.run(300)
    assert list(bench.readings()) == [(GPU_UP, ())]
    assert bench.value(GPU_UP) == 0
    assert "libnvidia-ml" in bench.message()
    assert len(caplog.records) == 1
    bench.double.has_library = True
    bench.run(LONGEST_PAUSE_SECONDS + 1)
    assert bench.value(GPU_UP) == 1


def test_what_an_old_driver_did_not_tell_is_asked_again_of_a_new_one() -> None:
    bench = Bench(Card(errors={FUNCTIONS["energy"]: pynvml.NVML_ERROR_FUNCTION_NOT_FOUND}))
    bench.run(2)
    assert bench.value(GPU_FIELD_SUPPORTED, "energy") == 0
    bench.double.failing = pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
    bench.run(2)
    bench.double.failing, bench.card.errors = None, {}
    bench.run(LONGEST_PAUSE_SECONDS)
    assert bench.value(GPU_FIELD_SUPPORTED, "energy") == 1
    assert bench.value(GPU_ENERGY_JOULES) == 0


def test_a_binding_that_breaks_is_no_end_of_the_watch() -> None:
    bench = Bench()
    bench.step()
    bench.card.errors = None  # type: ignore[assignment]
    bench.run(2)
    assert bench.value(GPU_UP) == 0
    assert bench.message() == "asking the GPU's driver failed: TypeError"


def test_a_driver_that_hangs_makes_the_sample_stale() -> None:
    bench = Bench()
    bench.step()
    bench.now = bench.watch.sample.taken_at + STALE_SECONDS
    assert bench.value(GPU_UP) == 1
    bench.now += 0.1
    assert bench.value(GPU_UP) == 0
    assert bench.value(GPU_POWER_WATTS) is None
    assert "not answered for 5 s" in bench.message()
    assert all(
        metric.kind is Kind.COUNTER or metric in {GPU_UP, GPU_FIELD_SUPPORTED, LINK_CEILING}
        for metric, _ in bench.readings()
    )


def test_before_the_first_answer_nothing_is_claimed() -> None:
    bench = Bench()
    assert bench.readings() == {(GPU_UP, ()): 0}
    assert bench.message() == "the GPU was not asked yet"


def test_a_slice_says_whose_numbers_these_are() -> None:
    card = Card(UUID_A)
    bench = Bench(card, [Slice(card)])
    bench.step()
    assert bench.value(GPU_UP) == 1
    assert bench.value(GPU_MEMORY_BYTES, "total") == 18 << 30
    assert bench.value(GPU_UTILIZATION) is None
    assert bench.message().startswith("a slice of a card (MIG)")
    assert "utilization: NVML: Not Supported" in bench.message()
