"""A machine with GPUs is looked at before anything is loaded, and nobody trains on its CPU by mistake."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
import torch

from penstock.pipeline.config import Config, ConfigError, load
from penstock.pipeline.preflight import gpus, machine
from penstock.pipeline.preflight.report import Report
from penstock.pipeline.resources import gpu_locks
from penstock.pipeline.resources.gpus import total_gpus
from penstock.pipeline.resources.host import HostNeeds, host_needs, registered_share, to_scale, too_small
from penstock.pipeline.resources.model_shape import shape_of
from penstock.pipeline.resources.placement import place, seats_of
from penstock.pipeline.run.serve import environment
from penstock.services.modeling.load import ModelError, device_of
from penstock.services.modeling.parallel.world import local_device
from penstock.services.runtime import gpus as runtime
from penstock.services.runtime import registry
from penstock.services.runtime.device_turn import devices_here
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.gpus import inventory, nccl_conflict, visible_gpus
from penstock.services.weights.transports import shared_memory
from tests import families
from tests.preflight.nvml import FakeNvml

CUDA_13_DRIVER = ("580.65.06", 13000)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    monkeypatch.setattr(runtime, "torch_cuda", lambda: 13)
    return FakeNvml(monkeypatch, (80.0, 80.0), *CUDA_13_DRIVER)


KL = "trainer.algorithm.kl.coefficient=0.1"
PPO = "trainer.algorithm={preset: ppo}"


def small(*overrides: str) -> Config:
    return load(Path("configs/grpo-0.5b.yaml"), list(overrides))


def found(config: Config) -> str:
    report = Report()
    gpus.look(config, report)
    return "\n".join(report.problems + report.here)


def test_gpus_are_what_the_driver_lists(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    assert visible_gpus() == ["0", "1"] and inventory().cuda == (13, 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")
    assert visible_gpus() == ["GPU-1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert visible_gpus() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1, -1, 0")
    assert visible_gpus() == ["1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    with pytest.raises(SetupError, match="there is no GPU 2; this machine has 2"):
        visible_gpus()


def test_a_vllm_for_gpus_without_one_is_an_error(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the GPU image it was "Device string must not be empty", and ten restarts."""
    built = {"vllm": "0.32.0"}
    monkeypatch.setattr(runtime, "version", built.__getitem__)
    assert "rollout.engine.type" not in found(small("rollout.engine.vllm.gpu_memory_utilization=0.1"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "rollout.engine.type: vLLM 0.32.0 is installed as it is for NVIDIA GPUs" in found(small())
    assert "rollout.engine.type" not in found(load(Path("configs/quickstart.yaml")))
    built["vllm"] = "0.32.0+cpu"
    assert "rollout.engine.type" not in found(small())


def test_a_driver_that_does_not_answer_is_no_machine_without_gpus(nvml: FakeNvml) -> None:
    """It counted as none: everybody shared GPU 0, or trained on the CPU."""
    nvml.error = pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
    with pytest.raises(SetupError, match="driver does not answer .* CUDA_VISIBLE_DEVICES="):
        visible_gpus()
    assert "driver does not answer" in found(small())
    for absent in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED):
        nvml.error = absent
        assert visible_gpus() == []


@pytest.mark.parametrize(
    ("family", "packages"),
    [("qwen3_5", "causal-conv1d flash-linear-attention"), ("qwen3_next", "causal-conv1d flash-linear-attention"),
     ("lfm2", "causal-conv1d"), ("granitemoehybrid", "causal-conv1d mamba-ssm"),
     ("nemotron_h", "causal-conv1d mamba-ssm"), ("qwen3", "")],
)  # fmt: skip
def test_kernels_that_a_model_would_be_faster_with_are_named(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, packages: str
) -> None:
    (tmp_path / "config.json").write_text(families.config_of(family).to_json_string(use_diff=False))
    config = small(f"model.path={tmp_path}", "rollout.engine.max_length=64", "rollout.sampling.max_new_tokens=8")
    report = Report()
    gpus.look(config, report)
    notes = [note for note in report.notes if "pip install" in note]
    assert [note.partition("pip install ")[2] for note in notes] == [packages] * bool(packages)
    config = config.model_copy(update={"run": config.run.model_copy(update={"deterministic": True})})
    refused = [line for line in found(config).split("\n") if line.startswith("run.deterministic: torch's reference")]
    sums = packages.partition(" ")[2]
    assert [re.findall(r"pip install ([^,]+),", line) for line in refused] == [[sums]] * bool(sums)
    monkeypatch.setattr(gpus, "find_spec", lambda name: name)
    report = Report()
    gpus.look(config, report)
    assert not report.notes


def test_a_job_with_a_part_of_a_node_counts_its_own_gpus_alone(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA does in it."""
    nvml.gpus, nvml.others = (80.0,) * 4, {0, 2}
    assert visible_gpus() == ["GPU-1", "GPU-3"] == list(devices_here("cuda")), "vLLM would ask NVML for a number's GPU"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [gpu.uuid for gpu in runtime.chosen_gpus().values()] == ["GPU-3"] == visible_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    with pytest.raises(SetupError, match="there is no GPU 2; this machine has 2"):
        visible_gpus()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    nvml.others = {0, 1, 2, 3}
    with pytest.raises(SetupError, match="has 4 GPUs, and none may be used here"):
        visible_gpus()


@pytest.mark.parametrize("error", [pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_NOT_SUPPORTED])
def test_a_gpu_whose_memory_is_not_told_can_be_used(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """One that MIG cuts, in a container; one that has its host's memory."""

    def refuse(handle: object) -> None:
        raise pynvml.NVMLError(error)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", refuse)
    assert visible_gpus() == ["0", "1"] and "of a size not told" in runtime.inventory().gpus[0].line
    assert "GPU 0" not in found(small("rollout.engine.vllm.gpu_memory_utilization=0.9"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-abc")
    assert visible_gpus() == ["MIG-abc"]


def test_a_torch_that_does_not_see_the_gpus_is_an_error(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    nvml.driver, nvml.cuda = "550.54.15", 12040
    wanted = r"torch is built for CUDA 13, and the driver 550\.54\.15 runs CUDA 12\.4 at most"
    assert "trainer.device: torch is built for CUDA 13" in found(small())
    with pytest.raises(ModelError, match=f"reference.device: {wanted}"):
        device_of("auto", "reference.device")
    monkeypatch.setattr(runtime, "torch_cuda", lambda: None)
    with pytest.raises(ModelError, match="this machine has 2 GPUs, .* built without CUDA"):
        device_of("auto")
    assert device_of("cpu") == torch.device("cpu"), "said so"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device_of("auto") == torch.device("cpu"), "said so too"


@pytest.mark.parametrize(
    ("sizes", "overrides", "message"),
    [
        ((80.0,), (), ""),
        ((80.0,), ("rollout.engine.vllm.gpu_memory_utilization=0.9",), "GPU 0 .* set .*gpu_memory_utilization=0.80"),
        ((80.0,), ("rollout.count=3",), "GPU 0 .*rollout-0 0.30, rollout-1 0.30, rollout-2 0.30.* set .*=0.2"),
        ((80.0,) * 3, ("rollout.engine.vllm.gpu_memory_utilization=0.9",), ""),
        ((10.0,), (), "GPU 0 .* use more GPUs"),
        ((80.0, 80.0), ("trainer.ranks=4",), "wants 6 GPUs .* there are 2"),
        ((80.0,), ("run.placement=colocated", "rollout.engine.vllm.gpu_memory_utilization=0.85"), ""),
        (
            (80.0,),
            ("run.placement=colocated", "rollout.engine.vllm.gpu_memory_utilization=0.95"),
            "trainer 0.02.* set .*_utilization=0.90",
        ),
        ((80.0,), ("run.placement=colocated", "rollout.count=2"), "2 rollouts want 2 GPUs, and trainer.ranks=1 has 1"),
        ((80.0,), ("run.placement=colocated", PPO, "critic.ranks=2"), "critic.ranks=2 want as many GPUs, and trainer"),
        ((80.0,), ("run.placement=colocated", PPO, "rollout.engine.vllm.gpu_memory_utilization=0.85"), ""),
        (
            (80.0,),
            ("run.placement=colocated", PPO, "rollout.engine.vllm.gpu_memory_utilization=0.97"),
            "trainer 0.02, rollout-0 0.97, critic 0.02",
        ),
    ],
)
def test_what_shares_a_gpu_must_fit_it(
    nvml: FakeNvml, sizes: tuple[float, ...], overrides: tuple[str, ...], message: str
) -> None:
    nvml.gpus = sizes
    said = found(small(*overrides))
    assert bool(said) == bool(message), said
    if message:
        assert re.search(message, said), said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("rollout.count=1",), ("engines are on 1 of the trainer's 8 GPUs", "one GPU of the trainer's 8 has the ref")),
        (("rollout.count=8", "reference.count=2"), ()),
        (
            ("rollout.count=2", "rollout.engine.vllm.tensor_parallel_size=2", "reference.count=8"),
            ("set rollout.count=4",),
        ),
        (("rollout.count=8", "trainer.algorithm.kl.coefficient=0"), ()),
        (("rollout.count=1", "rollout.engine.vllm.tensor_parallel_size=8"), ()),
        (("rollout.count=1", "run.placement=as_given"), ()),
    ],
)
def test_gpus_that_a_colocated_run_leaves_idle_are_told_of(
    nvml: FakeNvml, given: tuple[str, ...], said: tuple[str, ...]
) -> None:
    nvml.gpus = (80.0,) * 8
    report = Report()
    gpus.look(load(Path("configs/grpo-8b.yaml"), ["run.placement=colocated", "trainer.ranks=8", *given]), report)
    notes = [note for note in report.notes if "of the trainer's" in note]
    assert len(notes) == len(said) and all(map(str.__contains__, notes, said)), notes


def test_colocated_all_but_the_trainer_have_its_gpus() -> None:
    """Engines beside each other, a critic from the first, who only reads from the last on."""
    teacher = "scorers={wise: {scorer: teacher, columns: {wise: token}, gpus: 1, own_gpus: false, count: 2}}"
    keys = ["run.placement=colocated", "trainer.ranks=2", "rollout.count=2", PPO, teacher]
    placed = place(small(*keys), ["0", "1", "2", "3"])
    assert placed == {
        "trainer": "0,1", "critic": "0", "rollout-0": "0", "rollout-1": "1", "wise-0": "1", "wise-1": "0",
    }  # fmt: skip
    assert total_gpus(small(*keys)) == 2 and total_gpus(small(*keys, "critic.own_gpus=true", "critic.ranks=2")) == 4
    wide = place(small(*keys[:3], teacher.replace("gpus: 1", "gpus: 2"), KL, "trainer.ranks=3"), ["0", "1", "2"])
    assert [wide[name] for name in ("reference-0", "wise-0", "wise-1")] == ["2", "1,0", "2,1"]
    ranks = small(*keys[:3], teacher.replace("gpus: 1", "gpus: 2"), KL, "trainer.ranks=3")
    assert [seats_of(ranks, *who) for who in (("reference", 0), ("wise", 0), ("wise", 1))] == [[2], [1, 0], [2, 1]]
    apart = place(small(*keys, "critic.own_gpus=true", "scorers.wise.own_gpus=true"), ["0", "1", "2", "3", "4"])
    assert apart["trainer"] == "0,1" and {apart["critic"], apart["wise-0"], apart["wise-1"]} == {"2", "3", "4"}


def test_a_reference_over_several_gpus_has_them() -> None:
    config = small("rollout.count=1", KL, "reference.gpus=2", "reference.count=2")
    assert total_gpus(config) == 6
    assert place(config, list("012345"))["reference-1"] == "4,5"
    with pytest.raises(ConfigError, match=r"this run wants 6 GPUs \(.*reference-1 2\), and there are 5"):
        place(config, list("01234"))
    colocated = small("rollout.count=1", KL, "reference.gpus=2", "run.placement=colocated")
    with pytest.raises(ConfigError, match=r"reference-0 wants 2 GPUs, and trainer.ranks=1 has 1 .*\(reference.gpus\)"):
        place(colocated, ["0", "1"])
    assert not place(small(KL, "reference.gpus=2", "reference.device=cpu"), ["0", "1"]).get("reference-0")


def test_a_group_of_processes_that_has_too_few_gpus_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SetupError, match=r"trainer.ranks, .* 4 GPUs are wanted .* there are 2"):
        gpu_locks.claim(tmp_path, ["0", "1"], 4)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SetupError, match="trainer.ranks: rank 3 of this machine has no GPU of its own, there are 2"):
        local_device(torch.device("cuda"), "trainer")


def test_a_gpu_that_somebody_uses_is_told_of(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.free = 0.15
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    report = Report()
    gpus.look(small(), report)
    (note,) = [note for note in report.notes if "somebody uses" in note]
    assert note.startswith("somebody uses GPU 1 (12 of 80 GiB free)") and "CUDA_VISIBLE_DEVICES" in note
    nvml.free = 0.9
    report = Report()
    gpus.look(small(), report)
    assert not [note for note in report.notes if "somebody uses" in note]


def test_who_compiles_kernels_is_told_what_is_lacking_for_it(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would end minutes after its start with the exit code of a gcc."""

    def told(*overrides: str) -> list[str]:
        report = Report()
        gpus.look(small(*overrides), report)
        return [note.partition(":")[0] for note in report.notes if "are compiled" in note and "python3-dev" in note]

    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(Path(__file__).parent)})
    assert told() == ["rollout.engine.type"], "there is no Python.h"
    moments = "trainer.optimizer.moments=8bit"
    assert told(moments) == ["rollout.engine.type", "trainer.optimizer.moments"]
    assert told("rollout.engine={type: torch}") == told(moments, "run.elsewhere=[rollout, trainer]") == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert told() == []


def test_two_nccls_in_one_folder_are_an_error(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nccl_conflict() is None
    monkeypatch.setattr(runtime, "_is_installed", lambda package: True)
    monkeypatch.setattr(runtime, "version", lambda package: "2.28.9")
    assert "pip uninstall -y nvidia-nccl-cu12 && pip install --force-reinstall" in found(small())
    assert "--no-deps nvidia-nccl-cu13==2.28.9" in found(small())


def test_host_memory_shared_memory_and_disk_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.allowance, "memory", lambda: (128 << 30, 100 << 30))
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(total=64 << 30, free=64 << 30))
    config = load(Path("configs/grpo-70b.yaml"))
    needs = host_needs(config)
    assert needs
    assert needs.version == pytest.approx(70.55e9 * 2 / 2**30, rel=0.01)
    assert needs.shared == pytest.approx(4 * needs.version)
    said = {}
    for elsewhere in ("[]", "[rollout, trainer]"):
        report = Report()
        config = load(Path("configs/grpo-70b.yaml"), [f"run.elsewhere={elsewhere}"])
        machine.look(config, Path("runs/first"), report)
        said[elsewhere] = "\n".join(report.here)
    memory = ("weights.transport=auto: 4 versions of 131.4 GiB", "model.path: the trainer")
    assert all(key in said["[]"] for key in (*memory, "trainer.checkpoint.keep=2")), said
    assert not any(key in said["[rollout, trainer]"] for key in memory), "the trainer is on another machine"
    monkeypatch.setattr(machine.resource, "getrlimit", lambda what: (100, 100))
    report = Report()
    machine.look(load(Path("configs/quickstart.yaml")), Path("runs/first"), report)
    assert "open files: 100 are allowed, this run may need" in "\n".join(report.here)


def test_shared_memory_that_is_used_is_no_room_and_leftovers_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "directory", lambda: tmp_path)
    config = load(Path("configs/grpo-0.5b.yaml"))
    needs = host_needs(config)
    assert needs
    usage = SimpleNamespace(total=64 << 30, free=int(needs.shared * 2**30) - 5000)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage)

    def said() -> str:
        report = Report()
        machine._look_at_memory(config, tmp_path, report)
        return "\n".join(line for line in report.here if "must fit" in line)

    assert "GiB are free; end who uses it" in said()
    dead, alive = shared_memory.Probe("dead"), shared_memory.Probe("alive")
    for key in ("dead", "alive"):
        (tmp_path / shared_memory.new_name(key)).write_bytes(bytes(8192))
    dead._close()  # as the kernel does with a process that is gone
    assert said().count("rm ") == 1 and f"rm {tmp_path / dead.name.rpartition('probe-')[0]}*; or end who" in said()
    (tmp_path / "run.key").write_text("alive")
    assert not said(), "what is this run's own is there for it"
    alive.unlink()


def test_what_lies_on_the_host_of_an_adapters_trainer_is_counted() -> None:
    """The model is frozen, in bf16 or else fp32, and lies where its trainer's weights do."""
    weights = 8.19e9 / 2**30
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        given = ["trainer.lora={rank: 32}", f"model.dtype={dtype}", "trainer.checkpoint.keep=1"]
        offloaded = host_needs(load(Path("configs/grpo-8b.yaml"), [*given, "trainer.offload=true"]))
        resting = host_needs(load(Path("configs/grpo-8b.yaml"), [*given, "run.placement=colocated"]))
        assert offloaded and resting
        share = registered_share(shape_of(load(Path("configs/grpo-8b.yaml"))), 4)
        assert 1.2 < share < 1.4, "as torch registers memory"
        assert offloaded.offloaded - 16 / 12 * offloaded.staging == pytest.approx(share * size * weights, rel=0.01)
        assert resting.resting - resting.staging == pytest.approx(size * weights, rel=0.01)
    one, many = "trainer.tokens_per_micro_batch=8192", ["trainer.ranks=4", "trainer.gradient_checkpointing=true"]
    moved = host_needs(load(Path("configs/grpo-8b.yaml"), [one, *many, "trainer.offload_activations=true"]))
    left = host_needs(load(Path("configs/grpo-8b.yaml"), [one, *many]))
    assert (
        moved and left and moved.activations == pytest.approx(4 * 36 * 8192 * 4096 * 2 / 2**30) and not left.activations
    )
    config = load(Path("configs/grpo-8b.yaml"), many)
    assert moved.trainer_node(config) - left.trainer_node(config) == pytest.approx(moved.activations)
    best = ["prompts.eval_every=50", "trainer.checkpoint={every: 50, keep: 1, keep_best: true}"]
    needs = host_needs(load(Path("configs/grpo-8b.yaml"), best))
    assert needs and needs.checkpoints == pytest.approx(3 * needs.staging), "the newest, the best, the next one"


@pytest.mark.parametrize("more", ["trainer.offload=true", "run.placement=colocated", "trainer.lora={rank: 32}"])
def test_each_replica_has_a_copy_on_its_host(more: str) -> None:
    """Of all but what lies on the disk, where a checkpoint is written once."""
    given = ["trainer={ranks: 8, gradient_checkpointing: true}", more, "trainer.algorithm.preset=ppo"]
    given += ["rollout.sampling.n=2", "critic={ranks: 8, offload: true}"]
    counts = ([f"trainer.replicas={count}", f"critic.replicas={count}"] for count in (1, 4))
    one, four = (host_needs(load(Path("configs/grpo-8b.yaml"), [*given, *count])) for count in counts)
    assert one and four and one.checkpoints == four.checkpoints
    for name in ("offloaded", "resting", "staging", "critic"):
        assert getattr(four, name) == pytest.approx(4 * getattr(one, name)), name


def test_compose_is_given_what_the_model_needs() -> None:
    config = load(Path("configs/grpo-8b.yaml"))
    needs = host_needs(config)
    assert isinstance(needs, HostNeeds)
    enough = needs.compose(config)
    assert not too_small(config, enough)
    (said,) = too_small(config, enough | {"PENSTOCK_SHM": "8g"})
    assert said.startswith(f"PENSTOCK_SHM=8g: this model wants {enough['PENSTOCK_SHM']}")
    assert "docker volume rm penstock_shm" in said and "-v," not in said, "runs and Redis are in volumes, too"
    tiny = load(Path("configs/quickstart.yaml"))
    assert host_needs(tiny) is None and not too_small(tiny, {"PENSTOCK_SHM": "1g"})


def test_what_compose_starts_one_of_is_noted() -> None:
    config = load(Path("configs/quickstart.yaml"), ["rollout.count=3"])
    (said,) = to_scale(config, {"PENSTOCK_TRAINER_MEMORY": "8g"})
    assert said.startswith("rollout.count=3: ") and "--scale rollout=3 " in said and "(rollout-gpu=3 " in said
    assert not to_scale(config, {}), "elsewhere the config says how many"


def test_a_deterministic_run_on_gpus_tells_cublas_and_vllm(nvml: FakeNvml) -> None:
    spec = registry.actors(small())["rollout"]
    wanted = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "VLLM_BATCH_INVARIANT": "1"}
    assert wanted.items() <= environment(spec, small("run.deterministic=true")).items()
    assert not wanted.keys() & environment(spec, small()).keys()


def test_learners_and_references_tell_torch_how_to_keep_memory(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's sleep wants segments that do not grow."""
    said = {
        kind: environment(spec, small()).get("PYTORCH_ALLOC_CONF") for kind, spec in registry.actors(small()).items()
    }
    assert {kind for kind, value in said.items() if value} == {"trainer", "critic", "reference"}
    torch._C._accelerator_setAllocatorSettings(str(said["trainer"]))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert "PYTORCH_ALLOC_CONF" not in environment(registry.actors(small())["trainer"], small()), "the user's own stays"
