"""What `penstock launch` hands to clusters: scripts that bash takes, objects that Kubernetes takes."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema_rs
import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from penstock.pipeline.cli import app
from penstock.pipeline.config import Config, ConfigError, load
from penstock.pipeline.config.origin import Origin
from penstock.pipeline.launch import kubernetes, ray_cluster, ready, slurm
from penstock.pipeline.launch.parts import Part, parts_of
from penstock.pipeline.launch.ready import cluster_network
from penstock.pipeline.preflight import machine
from penstock.pipeline.preflight.reached import unreached
from penstock.pipeline.preflight.report import Report
from penstock.pipeline.resources.host import PROCESS_GIB, SPARE, host_needs, too_small
from penstock.pipeline.resources.placement import joining_guests, seated
from penstock.pipeline.resources.store_size import store_gib
from penstock.pipeline.run import launcher
from penstock.pipeline.run.folder import open_folder
from penstock.pipeline.run.join import shares
from penstock.pipeline.run.resume import resumed
from penstock.protocols.messages import Ack, Hello, Refused
from penstock.protocols.router_server import RouterServer
from penstock.services.runtime import registry
from penstock.services.runtime.address import reached_at
from tests.deploy.stack import until

ROOT = Path(__file__).parents[2]
QUICKSTART, GRPO = ROOT / "configs" / "quickstart.yaml", ROOT / "configs" / "grpo-0.5b.yaml"
SCHEMA = json.loads((ROOT / "tests" / "clusters" / "kubernetes-1.37.json").read_text())
"""Kubernetes' own of its API (Apache License 2.0), of the kinds that we make; unknown keys are refused."""
TYPES = {
    "Job": "io.k8s.api.batch.v1.Job",
    "Deployment": "io.k8s.api.apps.v1.Deployment",
    "ConfigMap": "io.k8s.api.core.v1.ConfigMap",
    "PersistentVolumeClaim": "io.k8s.api.core.v1.PersistentVolumeClaim",
    "NetworkPolicy": "io.k8s.api.networking.v1.NetworkPolicy",
    "Service": "io.k8s.api.core.v1.Service",
}
ELSEWHERE = "run.elsewhere=[rollout]"


def spread(file: Path, *overrides: str) -> Config:
    return load(file, [ELSEWHERE, *overrides])


def test_the_head_has_what_is_not_elsewhere() -> None:
    config = spread(GRPO, "rollout.count=6", "trainer.ranks=2")
    head, rollouts = parts_of(config, with_gpus=True, each=2)
    assert (head.kind, head.tasks, head.gpus) == ("head", 1, 2 + config.reference.count)
    assert (rollouts.tasks, rollouts.each, rollouts.gpus, rollouts.processes) == (3, 2, 2, 4)
    assert all(part.gpus == 0 for part in parts_of(config, with_gpus=False))
    both = spread(GRPO, "run.elsewhere=[rollout,trainer]", "trainer.ranks=2")
    assert [(part.kind, part.gpus) for part in parts_of(both, True)] == [("head", 1), ("rollout", 1), ("trainer", 2)]
    large = parts_of(load(GRPO.with_name("grpo-32b.yaml")), with_gpus=True)
    assert [(part.kind, part.tasks, part.gpus) for part in large] == [
        ("head", 1, 0),
        ("rollout", 4, 2),
        ("trainer", 2, 8),
    ]


def test_there_are_as_many_as_the_config_says_or_none() -> None:
    config = spread(QUICKSTART, "rollout.count=8")
    with pytest.raises(ConfigError, match=r"--each: 3 does not divide rollout.count=8; take one of 1, 2, 4, 8, or"):
        parts_of(config, with_gpus=False, each=3)
    for each in (1, 2, 4, 8, 100):
        _, rollouts = parts_of(config, with_gpus=False, each=each)
        assert rollouts.tasks * rollouts.each == 8


def test_guests_come_with_the_trainers_machines() -> None:
    keys = ["run.placement=colocated", "trainer.ranks=16", "trainer.nodes=2", "rollout.count=7", "rollout.threads=2"]
    config = load(GRPO, [*keys, *ready.spread(load(GRPO, keys))])
    assert set(config.run.elsewhere) == {"trainer", "rollout", "reference"}
    head, trainer = parts_of(config, with_gpus=True)
    assert (head.gpus, trainer.kind, trainer.tasks, trainer.gpus) == (0, "trainer", 2, 8)
    assert trainer.processes == 8 + 4 * 2 + 1 and trainer.cpus == 8 * 2 + 4 * (2 + 1) + 2
    assert joining_guests(config) == {"rollout": 4, "reference": 1}
    gpus = [str(i) for i in range(8)]
    assert seated(config, gpus, {"rollout-a-0": 4, "rollout-a-1": 4, "reference-a-0": 1}) == {
        "rollout-a-0": "0,1,2,3", "rollout-a-1": "4,5,6,7", "reference-a-0": "7",
    }  # fmt: skip
    assert seated(config, [], {"rollout-a-0": 1}) == {"rollout-a-0": ""}
    with pytest.raises(ConfigError, match="5 rollouts want 10 GPUs, and trainer.ranks=16 has 8 here"):
        two = "rollout.engine.vllm.tensor_parallel_size=2"
        parts_of(load(GRPO, [*keys, two, "rollout.count=10", "run.elsewhere=[trainer,rollout]"]), with_gpus=True)
    with pytest.raises(ConfigError, match="3 rollouts want 12 GPUs, and trainer.ranks=16 has 8 here"):
        seated(config, gpus, {f"rollout-a-{i}": 4 for i in range(3)})
    assert {kind for kind, _ in objects(config)} >= {"Job", "ConfigMap"}
    assert joining_guests(spread(GRPO)) == {}


@pytest.mark.parametrize("elsewhere, said", [("[nobody]", "'nobody' is none of"), ("[broker]", "'broker' is none of")])
def test_only_actors_can_be_elsewhere(elsewhere: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"run.elsewhere: {said}"):
        load(QUICKSTART, [f"run.elsewhere={elsewhere}"])


def test_who_joins_takes_the_gpus_that_it_sees() -> None:
    config = spread(GRPO, "rollout.engine.vllm.tensor_parallel_size=2")
    rollout, trainer = (registry.actors(config)[kind] for kind in ("rollout", "trainer"))
    gpus = [str(number) for number in range(5)]
    assert shares(rollout, config, gpus, None) == ["0,1", "2,3"]
    assert shares(rollout, config, [], 3) == ["", "", ""]
    assert shares(trainer, config, gpus, None) == ["0"]
    for spec, there, count, said in (
        (rollout, gpus, 3, "3 x rollout want 6 GPUs, and this machine has 5"),
        (rollout, gpus[:1], None, "1 x rollout want 2 GPUs, and this machine has 1"),
        (trainer, gpus, 2, "a run has one trainer"),
    ):
        with pytest.raises(ConfigError, match=f"--count: {said}"):
            shares(spec, config, there, count)


def test_a_network_that_is_none_is_told() -> None:
    assert cluster_network(Console(), "10.1.0.0/16") == "10.1.0.0/16"
    for wrong in ("10.1.0.7/16", "eth0", "fd00::/64"):
        with pytest.raises(ConfigError, match=r"--network: .*; e.g. 10.1.0.0/16"):
            cluster_network(Console(), wrong)


def test_a_network_that_is_given_counts_and_one_that_is_guessed_gives_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready, "own_network", lambda: "10.9.0.0/16")

    def placed(*given: str, resume: Path | None = None, network: str | None = None) -> tuple[str, str]:
        file = None if resume else QUICKSTART
        config = ready.resolve(Console(), file, [f"run.folder={tmp_path}", *given], resume, network)[0]
        assert config.run.elsewhere == ("rollout",) or config.run.elsewhere == ["rollout"]
        return config.broker.bind, config.weights.host

    own = ("broker.bind=tcp://10.1.0.7:5555", "weights.host=10.1.0.0/16")
    assert placed() == ("tcp://10.9.0.0/16:0", "10.9.0.0/16")
    assert placed(*own) == ("tcp://10.1.0.7:5555", "10.1.0.0/16")
    assert placed(*own, network="10.2.0.0/16") == ("tcp://10.2.0.0/16:0", "10.2.0.0/16")
    alone, beyond = tmp_path / "alone", tmp_path / "beyond"  # as `penstock run` leaves one, and `penstock launch`
    for folder, overrides in ((alone, ()), (beyond, own)):
        open_folder(load(QUICKSTART, list(overrides)), folder, Origin(str(QUICKSTART), overrides))
    assert placed(resume=alone) == ("tcp://10.9.0.0/16:0", "10.9.0.0/16"), "nobody else would reach it"
    assert placed(resume=beyond) == ("tcp://10.1.0.7:5555", "10.1.0.0/16")
    assert placed(resume=beyond, network="10.2.0.0/16") == ("tcp://10.2.0.0/16:0", "10.2.0.0/16")
    monkeypatch.setattr(ready, "own_network", lambda: None)
    assert placed(*own) == ("tcp://10.1.0.7:5555", "10.1.0.0/16"), "nothing is to be guessed"
    with pytest.raises(ConfigError, match="--network: this machine does not say"):
        placed(resume=alone)


@pytest.mark.parametrize(
    ("given", "told"),
    [([], True), (["weights.host=10.1.0.0/16"], False),
     (["weights.snapshot_advertise=tcp://10.1.0.7:5601", "weights.snapshot_port=5601"], False)],
)  # fmt: skip
def test_rollouts_elsewhere_that_are_sent_no_weights_are_a_note(tmp_path: Path, given: list[str], told: bool) -> None:
    report = Report()
    machine.look(spread(QUICKSTART, "broker.bind=tcp://0.0.0.0:5555", *given), tmp_path, report)
    assert not report.problems
    assert ["would be sent no weights" in note for note in report.notes] == [True] * told


@pytest.mark.parametrize(
    ("elsewhere", "asked", "refused"),
    [("rollout", "localhost:8431", True), ("rollout", "127.0.0.1:8432", False), ("reward", "localhost:8431", False)],
)
def test_who_would_ask_its_own_machine_for_a_program_of_the_heads_is_refused(
    tmp_path: Path, elsewhere: str, asked: str, refused: bool
) -> None:
    config = load(
        QUICKSTART,
        [
            "programs.judge={command: 'sleep 60', ready: 'http://127.0.0.1:8431/health'}",
            f"rollout.environment={{environment: 'mine:Shop', options: {{url: 'http://{asked}/v1'}}}}",
            f"run.elsewhere=[{elsewhere}]",
        ],
    )
    assert len(unreached(config)) == refused
    if refused:
        with pytest.raises(
            ConfigError, match=r"rollout.environment.options.url=http://localhost:8431/v1: programs.jud"
        ):
            ready.look_at(Console(), config, tmp_path)


# --- Slurm -----------------------------------------------------------------------------------------------------------


def test_a_slurm_script_asks_for_what_the_part_needs(tmp_path: Path) -> None:
    folder = tmp_path / "first-try"
    parts = [Part("head", 1, 1, 3, 8, 3), Part("rollout", 4, 2, 2, 2, 2)]
    given = ["--account=lab", "--comment=a b", "--mem=2G -p gpu", "--mail-user='me'"]
    made = slurm.scripts(folder, tmp_path, parts, given)
    head, rollout = made["slurm/head.sh"].splitlines(), made["slurm/rollout.sh"].splitlines()
    assert {"#SBATCH --gres=gpu:3", "#SBATCH --cpus-per-task=8", "#SBATCH --account=lab"} <= set(head)
    assert {'#SBATCH --comment="a b"', "#SBATCH --mem=2G -p gpu", "#SBATCH --mail-user='me'"} <= set(head)
    assert {"#SBATCH --gres=gpu:2", "#SBATCH --array=0-3", "#SBATCH --requeue"} <= set(rollout)
    assert any("penstock run --resume" in line or "cli run --resume" in line for line in head)
    with pytest.raises(ConfigError, match="run.folder: .* sbatch takes no such characters"):
        slurm.scripts(tmp_path / "first try", tmp_path, parts, [])
    for text in made.values():
        assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_vllm_has_cores_for_itself_and_a_job_is_told_the_memory_that_its_model_takes(tmp_path: Path) -> None:
    config = spread(GRPO, "rollout.engine.vllm.tensor_parallel_size=2", "rollout.count=4")
    head, rollout = parts_of(config, with_gpus=True)
    assert rollout.cpus == 2 + 2 and head.cpus == 1 + 1 + 2 * 2, "reward, and trainer and reference with a GPU each"
    assert rollout.memory_gib and head.memory_gib
    made = slurm.scripts(tmp_path / "a", tmp_path, [head, rollout], [])["slurm/rollout.sh"]
    assert f"{rollout.memory_gib} GiB for its models" in made
    assert "--mem" not in made, "a limit that kills what is not counted, a judge or a teacher"


def test_partitions_are_looked_at_wherever_they_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sinfo = tmp_path / "sinfo"
    sinfo.write_text("#!/bin/sh\necho 'gpu|gpu:a100:8'; echo 'gpu-large|gpu:h100:8'; echo 'cpu*|(null)'\n")
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for options, wanted, gpus in (
        ([], [], False),
        (["--partition=gpu,gpu-large"], ["gpu", "gpu-large"], True),
        (["--account=lab", "--partition=gpu"], ["gpu"], True),
        (["--account=lab -p gpu"], ["gpu"], True),
        (["--partition=gpu", "-pcpu"], ["cpu"], False),
        (["--parsable", "--comment=run-p"], [], False),
    ):
        assert slurm.partitions(options) == wanted and slurm.offers_gpus(wanted) == gpus
    with pytest.raises(ConfigError, match="--partition: sinfo knows none that is called 'gpus'; it has cpu, gpu,"):
        slurm.offers_gpus(["gpu", "gpus"])


@pytest.mark.parametrize(
    "sent, code, asked",
    [
        ("USR1", 0, "requeue 7"),
        ("INT", 130, "scancel 8"),
        ("TERM", 130, ""),
        (None, 3, "scancel 8"),
        (None, 75, ""),
        (None, 0, ""),
    ],
    ids=["time-limit", "told-to-stop", "preempted", "failed", "another-one-runs", "complete"],
)
def test_a_slurm_job_ends_as_it_should(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: str | None, code: int, asked: str
) -> None:
    """The script itself, with a command that leaves with 130 when it is told to, as `penstock run` does: by Ctrl-C's
    signal, which lets it save for an hour, where somebody ends it."""
    hears = 2 if sent == "INT" else 15
    work = "import signal, sys, time; assert signal.getsignal(2) is not signal.SIG_IGN; "
    work += f"signal.signal({hears}, lambda *_: sys.exit(130)); print(1); "
    work += "time.sleep(60)" if sent else f"sys.exit({code})"
    command = [sys.executable, "-u", "-c", work]
    monkeypatch.setattr(slurm, "penstock", lambda *_: command)
    made = slurm.scripts(tmp_path, tmp_path, [Part("head", 1, 1, 0, 1, 1)], [])
    slurm.write(tmp_path, made)
    slurm.members_file(tmp_path).write_text("8\n")
    for name in ("scontrol", "scancel"):  # what Slurm is asked for
        tool = tmp_path / name
        tool.write_text(f'#!/bin/sh\necho "{"" if name == "scontrol" else "scancel "}$@" >> {tmp_path}/asked\n')
        tool.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    begin = ["env", "--default-signal=INT", "bash"]  # as Slurm does: tests in the background would hand on "ignored"
    job = subprocess.Popen([*begin, str(tmp_path / "slurm/head.sh")], stdout=subprocess.PIPE, env=env)
    assert job.stdout and job.stdout.readline() == b"1\n"
    time.sleep(0.1)
    if sent:
        subprocess.run(["kill", f"-{sent}", str(job.pid)], check=True)
    assert job.wait(30) == (0 if asked.startswith("requeue") else code)
    said = tmp_path / "asked"
    assert (said.read_text().strip() if said.is_file() else "") == asked


def test_the_runs_own_job_alone_is_told_a_stores_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [Part("head", 1, 1, 0, 1, 1), Part("rollout", 2, 1, 0, 1, 1)]
    made = slurm.scripts(tmp_path, tmp_path, parts, [])
    slurm.write(tmp_path, made)
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f'#!/bin/sh\necho "$PENSTOCK_STORE" >> {tmp_path}/told; echo 7\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PENSTOCK_STORE", "redis://me:typed@10.1.0.7/0")
    slurm.submit(tmp_path, parts, "redis://me:secret@10.1.0.7/0")
    assert (tmp_path / "told").read_text().splitlines() == ["redis://me:secret@10.1.0.7/0", ""]
    assert not any("secret" in text for text in made.values())
    assert not ray_cluster.handed_on(os.environ, []).keys() & {"PENSTOCK_STORE"}


def test_a_run_whose_own_job_is_in_the_queue_is_not_submitted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue, folder = tmp_path / "squeue", tmp_path / "run"
    open_folder(load(QUICKSTART), folder, Origin(str(QUICKSTART), ()))
    slurm.write(folder, slurm.scripts(folder, tmp_path, [Part("head", 1, 1, 0, 1, 1)], []))
    slurm.head_file(folder).write_text("7")
    slurm.members_file(folder).write_text("8\n8\n9\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def asked(answer: str, exit_code: int = 0, folder: Path = folder) -> str:
        squeue.write_text(f"#!/bin/sh\necho '{answer}' >&{1 + bool(exit_code)}; exit {exit_code}\n")
        squeue.chmod(0o755)
        command = ["launch", "slurm", "--resume", str(folder), "--no-gpus", "--network", "127.0.0.0/8"]
        return str(CliRunner().invoke(app, command).exception)

    assert "job 7 of the run in" in (said := asked("PENDING")) and "first: scancel 7 8 9" in said
    assert "first: scancel --batch --signal=INT 7" in asked("RUNNING")
    assert "wait until it has left the queue" in (said := asked("COMPLETING")) and "scancel" not in said
    assert "squeue: it is down" in asked("it is down", 1)
    copied = shutil.copytree(folder, tmp_path / "copied")
    for _ in range(2):  # the second time it is in its own place
        assert "the run is ready" in asked("RUNNING", folder=copied)
    assert slurm.members_file(folder).read_text() == "8\n8\n9\n", "who has joined yet"
    for answer, exit_code in (("", 0), ("slurm_load_jobs error: Invalid job id specified", 1)):
        assert "the run is ready" in asked(answer, exit_code)


@pytest.mark.parametrize(("queue", "code"), [("7", 0), ("", 75), ("slurm_load_jobs error: Invalid job id", 75)])
def test_who_would_join_leaves_where_the_runs_own_job_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queue: str, code: int
) -> None:
    monkeypatch.setattr(slurm, "penstock", lambda *_: [sys.executable, "-c", "import sys; sys.exit(75)", ""])
    made = slurm.scripts(tmp_path, tmp_path, [Part("rollout", 1, 1, 0, 1, 1)], [])
    slurm.write(tmp_path, made)
    slurm.head_file(tmp_path).write_text("7")
    for name, does in (("scontrol", f"echo $@ >> {tmp_path}/asked"), ("squeue", f"echo '{queue}'")):
        tool = tmp_path / name
        tool.write_text(f"#!/bin/sh\n{does}\n")
        tool.chmod(0o755)
    # Of one task of each array it is so that its own number is the array's.
    array = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "3"}
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", **array}
    assert subprocess.run(["bash", "-c", made["slurm/rollout.sh"]], env=env, timeout=30).returncode == code
    assert (tmp_path / "asked").is_file() == (code == 0)
    assert code or (tmp_path / "asked").read_text() == "requeue 9_3\n", "and not all that run"


# --- Ray -------------------------------------------------------------------------------------------------------------


def test_processes_on_a_ray_cluster_have_the_launching_shells_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = {"HF_TOKEN": "a", "WANDB_API_KEY": "b", "https_proxy": "c", "NCCL_IB_HCA": "d", "PENSTOCK_TERM_S": "900"}
    others = {"PATH": "/", "SERPER_KEY": "e", "PENSTOCK_FOLDERS": "[]", "RAY_ADDRESS": "f"}
    assert ray_cluster.handed_on(shell | others, []) == shell
    env = ray_cluster.handed_on(shell | others, ["SERPER_KEY"])
    assert env == {**shell, "SERPER_KEY": "e"}
    with pytest.raises(ConfigError, match="--env: SERPER_TOKEN is not set here; export SERPER_TOKEN="):
        ray_cluster.handed_on(others, ["SERPER_TOKEN"])
    command = tmp_path / "python"
    command.write_text(f'#!/bin/sh\nenv > {tmp_path}/env; exit "$PENSTOCK_TERM_S"\n')
    command.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(command))
    monkeypatch.setenv("NCCL_IB_HCA", "of the node")
    monkeypatch.setenv("SERPER_KEY", "of the node")
    assert ray_cluster.Process(str(tmp_path), {**env, "PENSTOCK_TERM_S": "9"}, ("SERPER_KEY",)).run([]) == 9
    has = (tmp_path / "env").read_text().splitlines()
    assert {"HF_TOKEN=a", "NCCL_IB_HCA=of the node", "SERPER_KEY=e", f"PATH={os.environ['PATH']}"} <= set(has)


def test_a_process_on_a_ray_cluster_is_told_to_stop_as_who_launched_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "python"
    work = "import signal, sys, time; signal.signal(2, lambda *_: sys.exit(130)); open('begun', 'w'); time.sleep(30)"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{work}"\n')
    command.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(command))
    process, codes = ray_cluster.Process(str(tmp_path), {}), list[int]()

    def run() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as Ray does in all that it starts
        codes.append(process.run([]))

    running = threading.Thread(target=run)
    running.start()
    until("it has begun", lambda: (tmp_path / "begun").is_file(), 20)
    process.stop(signal.SIGINT)
    running.join(20)
    assert codes == [130]


def test_a_run_on_a_ray_cluster_has_an_hour_to_save_or_what_a_scheduler_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = list[float]()
    for number in (signal.SIGINT, signal.SIGTERM):
        clock, told = itertools.count(0, 60.0), list[int]()
        monkeypatch.setattr(ray_cluster.time, "monotonic", lambda clock=clock: next(clock))
        ray = SimpleNamespace(wait=lambda *_, **__: ([], []))
        head = SimpleNamespace(stop=SimpleNamespace(remote=told.append))
        assert ray_cluster._watch(ray, ("head", head, None), [], [number], lambda _: None) == 130 and told == [number]
        waited.append(next(clock))
    assert waited[0] > 3600 > waited[1] > launcher.TERM_S


# --- Kubernetes ------------------------------------------------------------------------------------------------------


def objects(config: Config, gpus: bool = True, **options: Any) -> dict[tuple[str, str], dict[str, Any]]:
    """What is made, each valid by Kubernetes' own schema, by kind and name."""
    made = kubernetes.manifests(config, parts_of(config, gpus), kubernetes.Options("first", "penstock:gpu", **options))
    found = list(yaml.safe_load_all(made))
    for item in found:
        if item["kind"] in TYPES:
            check = jsonschema_rs.validator_for({"$ref": f"#/$defs/{TYPES[item['kind']]}", **SCHEMA})
            assert not [f"{item['kind']} {error.instance_path}: {error.message}" for error in check.iter_errors(item)]
    return {(item["kind"], item["metadata"]["name"]): item for item in found}


def test_manifests_are_valid_and_join_one_run() -> None:
    found = objects(spread(GRPO, "rollout.count=4"), namespace="rl", secret="hf")
    assert {kind for kind, _ in found} == {"ConfigMap", "PersistentVolumeClaim", "NetworkPolicy", "Job"}
    assert {item["metadata"]["namespace"] for item in found.values()} == {"rl"}
    head, rollout = found["Job", "penstock-first-head"]["spec"], found["Job", "penstock-first-rollout"]["spec"]
    assert rollout["backoffLimit"] == 4 * head["backoffLimit"], "an eviction is a failure"
    assert rollout["parallelism"] == 4 and "completions" not in rollout  # one that ends well ends them all
    pod = head["template"]["spec"]
    assert pod["initContainers"][0]["args"] == [
        "prepare",
        "/config/config.yaml",
        "broker.bind=tcp://$(POD_IP):5555",
        "weights.host=$(POD_IP)",
        "--folder",
        "/penstock/runs/first",
        "--tell",
    ]
    assert pod["initContainers"][0]["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 2}
    config = yaml.safe_load(found["ConfigMap", "penstock-first"]["data"]["config.yaml"])
    assert config["run"]["elsewhere"] == ["rollout"] and config["rollout"]["count"] == 4


def test_an_image_that_was_built_again_is_pulled_again_unless_nodes_have_it_alone() -> None:
    for image, given, policy in (
        ("registry.lab:5000/penstock:gpu", None, "Always"),
        ("lab/penstock:gpu", None, "Always"),
        ("lab/penstock:gpu", "Never", "Never"),
        (f"registry.lab/penstock@sha256:{'0' * 64}", None, None),
        ("penstock:gpu", None, None),
        ("penstock:gpu", "IfNotPresent", "IfNotPresent"),
        ("localhost/penstock:gpu", None, None),
    ):
        options = kubernetes.Options("first", image, pull=given)
        made = kubernetes.manifests(spread(GRPO), parts_of(spread(GRPO), True), options)
        pods = [item["spec"]["template"]["spec"] for item in yaml.safe_load_all(made) if item["kind"] == "Job"]
        given = [container for pod in pods for container in (*pod["initContainers"], *pod["containers"])]
        assert len(given) == 4 and {container.get("imagePullPolicy") for container in given} == {policy}
        assert all(container["resources"]["requests"]["cpu"] for container in given), "or a quota refuses the pod"
        assert all(pod["shareProcessNamespace"] and not pod["enableServiceLinks"] for pod in pods)
    command = ["launch", "kubernetes", str(QUICKSTART), "--no-look", "--image=lab/penstock", "--pull-policy=Never"]
    written = CliRunner().invoke(app, command).stdout
    assert "imagePullPolicy: Never" in written and "Always" not in written


@pytest.mark.parametrize("name", ["config.yaml", "summary.json"])
def test_pods_that_join_wait_until_the_run_is_there_or_is_refused(tmp_path: Path, name: str) -> None:
    pod = objects(spread(GRPO))["Job", "penstock-first-rollout"]["spec"]["template"]["spec"]
    script = pod["initContainers"][0]["command"][2].replace("/penstock/runs/first", str(tmp_path))
    waits = subprocess.Popen(["sh", "-c", script.replace("sleep 2", "sleep 0.1")])
    time.sleep(0.2)
    assert waits.poll() is None
    (tmp_path / name).touch()
    assert waits.wait(20) == 0


@pytest.mark.parametrize("own", ["broker.bind=tcp://10.1.0.0/16:0", "weights.host=10.1.0.0/16"])
def test_a_config_is_looked_at_with_the_addresses_that_its_pod_will_have(tmp_path: Path, own: str) -> None:
    done = CliRunner().invoke(app, ["launch", "kubernetes", str(QUICKSTART), "--no-gpus", own])
    assert "kind: Job" in done.stdout and "weights.host" not in done.stderr
    found = objects(spread(QUICKSTART, own), gpus=False)
    (prepare,) = found["Job", "penstock-first-head"]["spec"]["template"]["spec"]["initContainers"]
    config = tmp_path / "config.yaml"
    config.write_text(found["ConfigMap", "penstock-first"]["data"]["config.yaml"])
    overrides = [word.replace("$(POD_IP)", reached_at("0.0.0.0")) for word in prepare["args"] if "=" in word]
    report = Report()
    machine.look(load(config, overrides), tmp_path, report)
    assert not report.problems and not report.here


@pytest.mark.parametrize(("look", "code"), [((), 2), (("--no-look",), 0)])
def test_what_cannot_work_is_told_before_pods_hold_gpus(look: tuple[str, ...], code: int) -> None:
    command = ["launch", "kubernetes", str(QUICKSTART), "reward.functions=[{function: 'mine:none'}]", *look]
    done = CliRunner().invoke(app, command)
    assert ("kind: Job" in done.output) == (code == 0), done.output
    assert ("--no-look" in str(done.exception)) == (code == 2)


@pytest.mark.parametrize("file", [QUICKSTART, GRPO, ROOT / "configs" / "grpo-8b.yaml"], ids=lambda file: file.stem)
def test_pods_have_the_shared_memory_that_prepare_asks_for(file: Path) -> None:
    found = objects(spread(file))
    pod = found["Job", "penstock-first-head"]["spec"]["template"]["spec"]
    given = {entry["name"]: entry.get("value", "") for entry in pod["initContainers"][0]["env"]}
    assert "PENSTOCK_SHM" in given and not too_small(spread(file), given)
    (shm,) = [volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shm"]
    assert shm["sizeLimit"] == given["PENSTOCK_SHM"].replace("g", "Gi")


def memory(found: dict[tuple[str, str], dict[str, Any]], part: str) -> int:
    """GiB that a pod of ``part`` asks for."""
    pod = found["Job", f"penstock-first-{part}"]["spec"]["template"]["spec"]
    return int(pod["containers"][0]["resources"]["requests"]["memory"].removesuffix("Gi"))


@pytest.mark.parametrize("name", ["grpo-32b", "grpo-30b-a3b", "grpo-70b"])
def test_memory_is_asked_for_where_the_trainer_is(name: str) -> None:
    config = load(ROOT / "configs" / f"{name}.yaml")
    needs, found = host_needs(config), objects(config)
    store = store_gib(config) / 2
    assert needs and memory(found, "head") <= SPARE * (2 * PROCESS_GIB + store), "a head without a trainer"
    ranks = config.trainer.ranks // config.trainer.nodes
    engine = PROCESS_GIB * parts_of(config, True)[1].processes + 2 * needs.version
    assert memory(found, "trainer") == pytest.approx(SPARE * needs.trainer_node(config, ranks), abs=1)
    assert memory(found, "rollout") == pytest.approx(SPARE * engine, abs=1), "the versions that it receives"
    joined = load(ROOT / "configs" / f"{name}.yaml", ["run.elsewhere=[rollout]", "trainer.nodes=1"])
    whole = needs.trainer_node(joined, joined.trainer.ranks) + PROCESS_GIB
    assert memory(objects(joined), "head") == pytest.approx(SPARE * (whole + store), abs=1)


def test_guests_memory_comes_on_top_of_the_trainers() -> None:
    """On a node whose rollouts receive versions, which the first node has in shared memory."""
    file, keys = ROOT / "configs" / "grpo-32b.yaml", ["run.placement=colocated", "rollout.count=8"]
    plain, beside = (load(file, more) for more in ([], [*keys, "run.elsewhere=[trainer,rollout]"]))
    needs = host_needs(beside)
    assert needs and needs.resting
    processes = 1 + registry.actors(beside)["rollout"].gpus(beside)
    more = needs.resting / 2 + 4 * (needs.beside("rollout", beside) + processes * PROCESS_GIB) - needs.shared
    own = memory(objects(plain), "trainer")
    assert memory(objects(beside), "trainer") == pytest.approx(own + SPARE * more, abs=2)


@pytest.mark.parametrize(
    ("given", "mapped"),
    [
        (["trainer={ranks: 16, nodes: 2}", "rollout.count=8"], False), (["rollout.count=4"], True),
        (["trainer={ranks: 16, nodes: 4}", "rollout.count=8"], False),
        (["rollout.count=4", "trainer.algorithm.kl.coefficient=0.01"], True),
        (["rollout.count=4", "weights.transport=gloo"], False),
    ],
    ids=["two nodes", "one", "nodes of four GPUs", "a reference", "by sockets"],
)  # fmt: skip
def test_a_cluster_is_asked_for_what_the_plan_counts_and_a_quarter_more(given: list[str], mapped: bool) -> None:
    """Rollouts beside the trainer map the versions that it serves, and have none of their own."""
    keys = ["run.placement=colocated", "run.elsewhere=[trainer,rollout,reference]", "trainer={ranks: 8, nodes: 1}"]
    keys, file = [*keys, *given], ROOT / "configs" / "grpo-32b.yaml"
    config, said = load(file, keys), CliRunner().invoke(app, ["plan", str(file), *keys]).output
    counted = max(map(int, re.findall(r"(\d+) GiB on (?:the trainer's|each)", " ".join(said.split()))))
    assert memory(objects(config), "trainer") == pytest.approx(SPARE * counted, abs=2)
    needs, nodes, references = host_needs(config), config.trainer.nodes, int(config.with_reference)
    assert needs
    own = needs.asleep(config) + (not mapped) * needs.received
    gib = (needs.staging + needs.resting + config.rollout.count * own) / nodes + references * needs.reference
    engine = registry.actors(config)["rollout"].gpus(config)
    each = config.rollout.count // nodes
    gib += (
        PROCESS_GIB * (config.trainer.ranks // nodes + each * (1 + engine) + references) + (nodes == 1) * needs.shared
    )
    assert counted == pytest.approx(gib, abs=1)


@pytest.mark.parametrize(
    ("given", "more"),
    [
        (["reward.workers=32"], 32), (["reward.workers=8", "reward.count=2"], 16 + 1), ([], 0),
        (["reward.functions=[{function: code_tests}, {function: exact_match}]"], 4),
        (["reward.functions=[{function: 'mine:reward'}]", "reward.count=4"], 4 + 3),
        (["reward.functions=[{function: judge, options: {model: m, url: u}}]", "reward.workers=32"], 0),
    ],
)  # fmt: skip
def test_the_head_has_cores_for_its_rewards(given: list[str], more: int) -> None:
    """One more for each further process."""
    plain, head = (parts_of(spread(GRPO, *each), with_gpus=True)[0].cpus for each in ([], given))
    assert head == plain + more


def test_a_scorer_is_an_object_whatever_its_name() -> None:
    def judged(name: str, *more: str) -> Config:
        scorers = ", ".join(
            f'{each}: {{scorer: "m:J", columns: {{s{i}: token}}}}' for i, each in enumerate([name, *more])
        )
        return load(QUICKSTART, [f"scorers={{{scorers}}}", f"run.elsewhere=[{','.join(['rollout', name, *more])}]"])

    job = objects(judged("My_judge"), gpus=False)["Job", "penstock-first-my-judge"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["name"] == "my-judge" and container["args"][2] == "My_judge"
    assert job["metadata"]["labels"]["app.kubernetes.io/component"] == "My_judge"
    with pytest.raises(ConfigError, match="the Job of my_judge would be called penstock-first-my-judge"):
        objects(judged("my_judge", "My_judge"), gpus=False)
    with pytest.raises(ConfigError, match="at most 63 long; call the scorer otherwise"):
        objects(judged("judge" * 20), gpus=False)


def test_a_pod_is_replaced_before_its_dead_node_says_that_it_has_ended() -> None:
    jobs = [item["spec"] for (kind, _), item in objects(load(GRPO.with_name("grpo-32b.yaml"))).items() if kind == "Job"]
    assert len(jobs) == 3 and all(job.get("podReplacementPolicy") != "Failed" for job in jobs)


def test_without_gpus_none_is_asked_for() -> None:
    found = objects(spread(QUICKSTART), gpus=False, claim="shared")
    assert ("PersistentVolumeClaim", "penstock-first") not in found
    pod = found["Job", "penstock-first-rollout"]["spec"]["template"]["spec"]
    assert "limits" not in pod["containers"][0]["resources"]
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "shared"}


def test_rollouts_may_be_scaled_by_the_groups_that_are_leased() -> None:
    found = objects(spread(GRPO), prometheus="http://prometheus:9090", autoscale=(0, 8))
    assert ("Deployment", "penstock-first-rollout") in found and ("Job", "penstock-first-rollout") not in found
    scaled = found["ScaledObject", "penstock-first-rollout"]["spec"]
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (0, 8)
    assert 'run="first"' in scaled["triggers"][0]["metadata"]["query"]
    head = found["Job", "penstock-first-head"]["spec"]["template"]["spec"]["containers"][0]
    assert "run.prometheus=0.0.0.0:9400" in head["args"]


def test_what_kubernetes_would_not_take_is_refused() -> None:
    for text in ("8", "3:2", "0:0", "a:b"):
        with pytest.raises(ConfigError, match="--autoscale"):
            kubernetes.bounds(text)
    with pytest.raises(ConfigError, match="--name"):
        kubernetes.object_name("_" * 5)
    assert kubernetes.object_name("First_try.2") == "first-try-2"
    with pytest.raises(ConfigError, match="--autoscale: KEDA reads from a Prometheus"):
        objects(spread(GRPO), autoscale=(0, 8))
    with pytest.raises(ConfigError, match="--autoscale: the least must be 0"):
        objects(spread(GRPO), autoscale=(1, 8), prometheus="http://prometheus:9090")


def test_a_stores_password_comes_from_a_secret_to_the_head_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "redis://me:secret@10.1.0.7:6379/0"
    with pytest.raises(ConfigError, match="store.url: its password .* into a secret as PENSTOCK_STORE"):
        objects(spread(QUICKSTART, f"store.url={url}"))
    found = objects(spread(QUICKSTART, f"store.url={url}"), secret="mine")
    assert url not in str(found) and "redis://me:***@" in str(found["ConfigMap", "penstock-first"])
    for part, container, hidden in (
        ("head", "initContainers", []),
        ("head", "containers", []),
        ("rollout", "containers", [""]),
    ):
        (pod,) = found["Job", f"penstock-first-{part}"]["spec"]["template"]["spec"][container]
        assert pod["envFrom"] == [{"secretRef": {"name": "mine"}}]
        assert [entry["value"] for entry in pod["env"] if entry["name"] == "PENSTOCK_STORE"] == hidden
    config, folder = tmp_path / "config.yaml", tmp_path / "first"
    config.write_text(found["ConfigMap", "penstock-first"]["data"]["config.yaml"])
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").touch()
    monkeypatch.setenv("PENSTOCK_STORE", "redis://me:secret@10.1.0.8:6379/0")
    prepare = ["prepare", str(config), "--folder", str(folder), "--looked"]
    assert "give it again" in str(CliRunner().invoke(app, prepare).exception)
    monkeypatch.setenv("PENSTOCK_STORE", url)
    assert CliRunner().invoke(app, prepare).exit_code == 0
    assert resumed(folder, None, [])[0].store.url == url and "secret" not in (folder / "config.yaml").read_text()


@pytest.mark.parametrize("let_in", [False, True])
def test_who_joins_says_why_the_broker_refuses(tmp_path: Path, let_in: bool) -> None:
    server = RouterServer("tcp://127.0.0.1:0", None)
    (tmp_path / "config.yaml").write_text("model: {type: tiny}\nprompts: {train: {type: sort}}\n")
    (tmp_path / "broker.address").write_text(server.address)
    command = [sys.executable, "-m", "penstock.pipeline.cli", "join", str(tmp_path), "--patience", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as joining:
        while joining.poll() is None:
            for identity, request, message in server.receive(0.1):
                welcome = let_in and isinstance(message, Hello)
                refused = Refused(code="bad_message", reason="protocol 41 is spoken here")
                server.send(identity, Ack() if welcome else refused, request)
            server.flush()
        output, error = joining.communicate()
    server.close()
    assert joining.returncode == 2, output + error
    assert f"the broker at {server.address} refuses: protocol 41 is spoken here" in error
