"""Whether the CPU's energy can be read (RAPL); a GPU's driver reports its power."""

from __future__ import annotations

from splitpoint_cli.checks.finding import Finding, Places, Verdict


def check_rapl(places: Places) -> Finding:
    name = "CPU energy"
    folder = places.sys / "class/powercap"
    zones = list(folder.glob("intel-rapl:*"))
    if not zones:
        return Finding(
            name, Verdict.NOTE, "no RAPL here (a virtual machine?): CPU energy is not measured"
        )
    from worker_service.hardware.rapl import packages  # loads the metrics library

    readable = packages(folder)
    if not readable:
        return Finding(
            name,
            Verdict.NOTE,
            "RAPL may not be read by this user: CPU energy is not measured",
            f"Let others read it until the next boot: sudo chmod a+r "
            f"{folder}/intel-rapl:*/energy_uj",
        )
    return Finding(name, Verdict.OK, f"RAPL of {len(readable)} CPU packages may be read")
