"""Chaos over a few seeds; `make chaos` plays as many as one likes."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from crash import chaos

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_whatever_is_killed_frozen_or_cancelled_the_laws_hold(tmp_path: Path, seed: int) -> None:
    assert chaos.play(tmp_path, chaos.arguments([f"--seed={seed}"])) == []


def test_with_a_class_declared_wrongly_the_damage_is_found_twin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Protection off: what must not be repeated is declared as what may be."""
    monkeypatch.setenv(chaos.TWIN, "1")
    found = [sentence for seed in range(3) for sentence in chaos.play(_made(tmp_path / str(seed)), _short(seed))]
    assert any(sentence.startswith("pay") for sentence in found), found


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _short(seed: int) -> argparse.Namespace:
    return chaos.arguments([f"--seed={seed}", "--seconds=15", "--submissions=50", "--gap=0.6"])
