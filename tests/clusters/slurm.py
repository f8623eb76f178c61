"""A real Slurm of several nodes on this machine: each node is a slurmd with a port of its own."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
CPUS, MEMORY_MB = 4, 64_000
SILENT_S = 10
"""A node that is silent for so long is down."""

CONFIG = """\
ClusterName=penstock
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SlurmdTimeout={silent}
KillWait=10
ReturnToService=2
SchedulerParameters=sched_interval=1,bf_interval=1
NodeName=DEFAULT CPUs={cpus} RealMemory={memory} State=UNKNOWN
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port={first}-{last}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """What of Slurm is not installed here (Debian: slurm-wlm)."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


class Slurm:
    """Up from `start` to `stop`; ``environment`` is for whoever asks it."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self._folder, self._nodes = folder, [f"n{number + 1}" for number in range(nodes)]
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        """Until every node is idle."""
        (self._folder / "state").mkdir(parents=True)
        key = self._folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        port = _free_ports(1 + len(self._nodes))
        (self._folder / "slurm.conf").write_text(
            CONFIG.format(
                host=socket.gethostname().partition(".")[0],
                folder=self._folder,
                port=port,
                first=port + 1,
                last=port + len(self._nodes),
                nodes=len(self._nodes),
                cpus=CPUS,
                memory=MEMORY_MB,
                silent=SILENT_S,
            )
        )
        munge = ["--key-file", "--socket", "--pid-file", "--log-file", "--seed-file"]
        names = ["munge.key", "munge.socket", "munged.pid", "munged.log", "munge.seed"]
        files = [f"{option}={self._folder / name}" for option, name in zip(munge, names, strict=True)]
        self._run("munged", "--force", *files)
        self._run("slurmctld")
        for node in self._nodes:
            self._run("slurmd", "-N", node)
        deadline = time.monotonic() + 60
        while self.ask("sinfo", "--noheader", "--format=%D %t").split() != [str(len(self._nodes)), "idle"]:
            assert time.monotonic() < deadline, self.ask("sinfo")
            time.sleep(0.5)

    def stop(self) -> None:
        """Leaves no process behind."""
        for process in _family(self._processes()):
            process.kill()

    def ask(self, *command: str) -> str:
        """What a command of Slurm's says."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def jobs(self) -> dict[str, tuple[str, str, str]]:
        """State, node (empty while it has none) and reason of each job, by its number, ``12`` or ``13_0``."""
        lines = self.ask("squeue", "--noheader", "--array", "--format=%i|%T|%N|%r").splitlines()
        return {job: (state, node, reason) for job, state, node, reason in (line.split("|") for line in lines)}

    def start_soon(self, job: str) -> None:
        """Soon: Slurm lets one that was queued again wait for two minutes."""
        self.ask("scontrol", "update", f"JobId={job}", "StartTime=now+20")

    def kill_node(self, node: str) -> int:
        """Its slurmd and all that runs on it, at once; returns how many processes that were."""
        own = _family([p for p in self._processes() if _is_of(p, node)])
        for process in own:
            process.send_signal(signal.SIGSTOP)  # nobody tells anybody
        for process in own:
            process.kill()
        return len(own)

    def _processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if str(self._folder) in process.environ().get("SLURM_CONF", "") and process.pid != os.getpid():
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def _run(self, *command: str) -> None:
        subprocess.run(command, env=self.environment, check=True, capture_output=True, timeout=60)


def _family(processes: list[psutil.Process]) -> set[psutil.Process]:
    """With those that they have started, and their slurmstepd: who names itself as it likes shows no environment."""
    own = {*processes, *(child for p in processes for child in p.children(recursive=True))}
    return own | {parent for parent in (p.parent() for p in own) if parent and "slurmstepd" in parent.name()}


def _is_of(process: psutil.Process, node: str) -> bool:
    try:
        command = process.cmdline()
        daemon = Path(command[0]).name if command else ""
        return process.environ().get("SLURMD_NODENAME") == node or (daemon == "slurmd" and command[-1] == node)
    except psutil.Error:
        return False


def _free_ports(count: int) -> int:
    """The first of ``count`` ports in a row that nobody listens at."""
    taken = {found.laddr.port for found in psutil.net_connections("tcp") if found.laddr}
    return next(port for port in range(17000, 30000) if not taken & set(range(port, port + count)))
