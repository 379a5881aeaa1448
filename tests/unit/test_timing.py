"""Turns: who gives the same file times alone."""

from __future__ import annotations

import threading
from pathlib import Path

from fxoffload.timing import turn


def test_turns_exclude_each_other(tmp_path: Path):
    inside = threading.Event()
    lock = tmp_path / "lock"

    def other() -> None:
        with turn(lock):
            inside.set()

    thread = threading.Thread(target=other)
    with turn(lock), turn(tmp_path / "another"), turn(None):
        thread.start()
        assert not inside.wait(0.2)
    thread.join(60)
    assert inside.is_set()
