"""Profiles from files: alone, or inside what `splitpoint status --json` prints."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from splitpoint.costs.profile import BUILT_IN_PROFILES, Profile, load_profile
from splitpoint.errors import InvalidArgument

MEASURED = BUILT_IN_PROFILES["a100-80"]


def test_a_profile_by_name_from_a_file_and_from_a_status(tmp_path: Path) -> None:
    assert load_profile("A100-80") == MEASURED
    alone = tmp_path / "profile.json"
    alone.write_text(MEASURED.to_json())
    assert load_profile(str(alone)) == MEASURED
    status = tmp_path / "status.json"
    workers = [{"id": "0", "profile": None}, {"id": "1", "profile": asdict(MEASURED)}]
    status.write_text(json.dumps({"complete": True, "workers": workers}))
    described = f"worker 1: {MEASURED.description}"
    assert load_profile(str(status)) == replace(MEASURED, description=described)


def test_a_profile_names_its_model(tmp_path: Path) -> None:
    """Statuses of older versions name it beside the workers only, as clients call it."""
    path = tmp_path / "status.json"

    def model_of(profile: Profile, *names: str) -> str:
        status = {"models": [{"name": name} for name in names]}
        path.write_text(
            json.dumps({**status, "workers": [{"id": "0", "profile": asdict(profile)}]})
        )
        return load_profile(str(path)).model

    assert model_of(MEASURED) == ""
    assert model_of(MEASURED, "an/older", "other") == "an/older"
    assert model_of(replace(MEASURED, model="measured"), "served as") == "measured"
    path.write_text(json.dumps({**asdict(MEASURED), "model": ["a", "list"]}))
    with pytest.raises(InvalidArgument, match="model must be a name"):
        load_profile(str(path))


@pytest.mark.parametrize("text", ['{"workers": []}', '{"workers": 3}', "[1]", "nonsense"])
def test_files_without_a_profile(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match="not a profile") as caught:
        load_profile(str(path))
    assert caught.value.message.startswith(f"{path}: ")
    with pytest.raises(InvalidArgument, match="neither a file nor one of"):
        load_profile(str(tmp_path / "absent"))
