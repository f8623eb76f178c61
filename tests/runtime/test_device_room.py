"""Memory of a guest that has just died is waited for."""

from __future__ import annotations

import pytest

from penstock.services.runtime import device_room
from penstock.services.runtime.device_room import DeviceRoom
from tests.preflight.nvml import FakeNvml


def test_a_learner_waits_until_as_much_is_free_as_the_last_time(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(monkeypatch, (80.0,), "580.1", 13000)
    room, beats = DeviceRoom("GPU-0"), list[float]()
    monkeypatch.setattr(device_room, "POLL_S", 0.001)

    def beat() -> None:
        beats.append(nvml.free)
        nvml.free = min(0.9, nvml.free + 0.1)

    nvml.free = 0.9
    room.wait(beat)
    assert not beats, "nothing is known of a time before"
    nvml.free = 0.5
    room.wait(beat)
    assert len(beats) == 4 and nvml.free == pytest.approx(0.9)
    monkeypatch.setattr(device_room, "SETTLES_S", 0.02)
    nvml.free = 0.3
    room.wait(lambda: None)  # somebody else has it now, and keeps it
    nvml.free = 0.3
    room.wait(beat)
    assert len(beats) == 4, "so much is all that there is"


def test_a_cpu_is_not_asked() -> None:
    DeviceRoom("cpu-here").wait(lambda: None)
