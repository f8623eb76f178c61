"""Memory of a guest that has just died is waited for."""

from __future__ import annotations

import pynvml  # type: ignore[import-untyped]
import pytest

from penstock.services.runtime import device_room
from penstock.services.runtime.device_room import DeviceRoom
from tests.preflight.nvml import FakeNvml


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    monkeypatch.setattr(device_room, "POLL_S", 0.001)
    monkeypatch.setattr(device_room, "STABLE_S", 0.05)
    return FakeNvml(monkeypatch, (80.0,), "580.1", 13000)


def test_a_learner_waits_until_as_much_is_free_as_ever_before(nvml: FakeNvml) -> None:
    room, beats = DeviceRoom("GPU-0"), list[float]()

    def beat() -> None:
        beats.append(nvml.free)
        nvml.free = min(0.9, nvml.free + 0.1)

    nvml.free = 0.8
    room.wait(beat)
    assert not beats, "nothing is known of a time before"
    nvml.free = 0.95
    room.wait(beat)
    nvml.free = 0.8
    room.wait(beat)
    assert not beats, "so little was enough"
    nvml.free = 0.5
    room.wait(beat)
    assert len(beats) == 3 and nvml.free == pytest.approx(0.8)


def test_who_has_come_to_stay_is_waited_for_once_and_shortly(nvml: FakeNvml) -> None:
    room, beats = DeviceRoom("GPU-0"), list[int]()
    nvml.free = 0.8
    room.wait(lambda: None)
    nvml.free = 0.6
    room.wait(lambda: beats.append(1))
    assert 1 < len(beats) < 60
    room.wait(lambda: beats.append(2))
    assert 2 not in beats


def test_a_driver_that_says_nothing_holds_up_nobody(nvml: FakeNvml) -> None:
    room = DeviceRoom("GPU-0")
    room.wait(lambda: None)
    nvml.error = pynvml.NVML_ERROR_UNKNOWN
    room.wait(lambda: None)
    DeviceRoom("cpu-here").wait(lambda: None)
