"""Every example workflow, run as its reader would: it ends as its first line says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "workflows"
EXAMPLES = sorted(FOLDER.glob("*.yaml"))
JOBS = ("ci-diagnosis", "junit-triage", "release-notes", "dependency-update", "gated-deployment", "incident-timeline",
        "canary-check", "configuration-drift", "remediation-loop", "sbom-triage")  # fmt: skip


def test_there_is_one_for_each_job() -> None:
    assert set(JOBS) <= {path.stem for path in EXAMPLES}


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_it_ends_as_its_first_line_says(path: Path, tmp_path: Path) -> None:
    first = path.read_text().splitlines()[0]
    expected = int(re.search(r"[Ee]xit code (\d+)", first)[1])  # type: ignore[index]
    place = tmp_path / "work"
    shutil.copytree(FOLDER, place)
    ran = subprocess.run(
        [sys.executable, "-m", "perdure.cli", "run", path.name],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == expected, ran.stderr
    if expected not in (2, 3) or "waiting" in first:
        assert ran.stdout.startswith("run_"), "the run's id comes first"
        verified = subprocess.run(
            [sys.executable, "-m", "perdure.cli", "verify"], cwd=place, capture_output=True, check=False
        )
        assert verified.returncode == 0, verified.stdout
