"""Whether the CPU's energy can be read (RAPL); what a GPU draws comes with its driver."""

from __future__ import annotations

import os

from splitpoint_cli.checks.finding import Finding, Places, Verdict


def check_rapl(places: Places) -> Finding:
    name = "CPU energy"
    zones = sorted((places.sys / "class/powercap").glob("intel-rapl:*/energy_uj"))
    if not zones:
        return Finding(
            name, Verdict.NOTE, "no RAPL here (a virtual machine?): CPU energy is not measured"
        )
    closed = [zone for zone in zones if not os.access(zone, os.R_OK)]
    if closed:
        return Finding(
            name,
            Verdict.NOTE,
            "RAPL is for root only: CPU energy is not measured",
            f"Let others read it until the next boot: sudo chmod a+r "
            f"{places.sys}/class/powercap/intel-rapl:*/energy_uj",
        )
    return Finding(name, Verdict.OK, f"RAPL, {len(zones)} zones")
