"""A reward that waits, as a judge over the network does: what `penstock bench scoring` scores with."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

SIGMA = 1.0
"""Of the logarithm: most answers come soon, some late."""


def wait_s(mean_s: float, most_s: float) -> float:
    """Seconds: lognormal, ``mean_s`` on average, at most ``most_s``."""
    return min(random.lognormvariate(math.log(mean_s) - SIGMA**2 / 2, SIGMA), most_s)


async def judge(response: str, truth: Any, mean_s: float = 0.5, most_s: float = 4.0) -> float:
    """1.0 where ``response`` is the truth, after a lognormal wait of ``mean_s`` seconds on average, at most
    ``most_s``."""
    await asyncio.sleep(wait_s(mean_s, most_s))
    return float(response.strip() == str(truth).strip())
