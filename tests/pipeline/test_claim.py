"""GPUs of its own for every container of a machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ASK = """
import sys, pathlib
from penstock.pipeline.resources.gpu_locks import claim
print(*claim(pathlib.Path(sys.argv[1]), ["0", "1", "2"], int(sys.argv[2])), flush=True)
sys.stdin.read()
"""


class Claimer:
    def __init__(self, folder: Path, count: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", ASK, str(folder), str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout
        lines = iter(self.process.stdout.readline, "")
        self.gpus = next(line for line in lines if not line.startswith("20")).split()  # a warning is dated

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def test_each_takes_what_nobody_has_and_a_death_gives_back(tmp_path: Path) -> None:
    first, second, third = Claimer(tmp_path, 1), Claimer(tmp_path, 2), Claimer(tmp_path, 2)
    try:
        assert first.gpus == ["0"] and second.gpus == ["1", "2"]
        assert third.gpus == ["0", "1"]  # all are taken: shared
        first.kill()
        second.kill()
        fourth = Claimer(tmp_path, 3)
        assert fourth.gpus == ["0", "1", "2"]  # the first places of all three are free again
        fourth.kill()
    finally:
        third.kill()
