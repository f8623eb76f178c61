"""GPUs that people rent: what their makers say of them. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One kind of GPU."""

    name: str
    gib: float
    tflops: float
    """Dense, in bf16."""
    gb_s: float
    """Of its memory."""
    link_gb_s: float
    """To the other GPUs of its machine, one way: NVLink's, or PCIe's where there is none."""
    host_gb_s: float
    """To its host's memory, one way: PCIe's."""
    network_gb_s: float
    """From its machine to others, one way, over as many network cards as such machines usually have."""


MACHINE = 8
"""GPUs of one machine."""


DEVICES = {
    device.name: device
    for device in (  # name, GiB, TFLOPS, then GB/s of memory, link, host, network
        Device("L4", 22.4, 121, 300, 32, 32, 12.5),
        Device("A10", 22.4, 125, 600, 32, 32, 12.5),
        Device("RTX3090", 24, 71, 936, 32, 32, 3),
        Device("RTX4090", 24, 165, 1008, 32, 32, 3),
        Device("RTX5090", 31.8, 210, 1792, 64, 64, 3),
        Device("A100-40", 40, 312, 1555, 300, 32, 50),
        Device("L40S", 44.9, 362, 864, 32, 32, 25),
        Device("RTXA6000", 48, 155, 768, 32, 32, 12.5),
        Device("A100", 80, 312, 2039, 300, 32, 200),
        Device("RTXPRO6000", 95.6, 504, 1792, 64, 64, 25),
        Device("H100", 80, 989, 3350, 450, 64, 400),
        Device("H200", 141, 989, 4800, 450, 64, 400),
        Device("B200", 180, 2250, 8000, 900, 64, 400),
    )
}
"""By name, as the makers' data sheets have them (SXM where there are several), but for memory of which the driver keeps
a part; networks as clouds rent them out."""


def device_called(name: str, gib: float) -> Device | None:
    """What the driver calls ``NVIDIA A100-SXM4-80GB``, say, and has so much memory; None where it is none of these."""
    plain = name.upper().replace(" ", "")
    called = [device for device in DEVICES.values() if device.name.partition("-")[0] in plain]
    near = [device for device in called if abs(device.gib - gib) <= 0.15 * device.gib]
    return max(near, key=lambda device: len(device.name.partition("-")[0]), default=None)


THE_SAME = frozenset(("SXM4", "SXM5", "HBM3", "HBM3E"))
"""Words behind a GPU's name that change nothing of its peak. NVIDIA sells others of the same name that are slower: an
H100 for PCIe, an A10G, an RTX 4090 D, a part of one (MIG)."""


def peak_tflops(name: str) -> float | None:
    """Dense bf16 TFLOPS of what the driver calls ``NVIDIA H100 80GB HBM3``, say; None where nobody here knows: another
    word in the name may mean another chip."""
    plain = re.sub("NVIDIA |GEFORCE ", "", name.upper()).replace("RTX ", "RTX")
    kind, *more = re.split("[ -]", plain)
    if kind == "A100":  # as fast behind PCIe
        more = [word for word in more if word != "PCIE"]
    known = kind in DEVICES and all(word in THE_SAME or re.fullmatch(r"\d+GB", word) for word in more)
    return DEVICES[kind].tflops if known else None
