"""`run.placement: auto`: what the planner would take on the GPUs that are here."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from penstock.pipeline.config import Config, ConfigError, load
from penstock.pipeline.resources.choice import choose
from penstock.pipeline.resources.memory import plan
from penstock.pipeline.resources.model_shape import shape_of
from penstock.pipeline.resources.trainer_memory import trainer_gib
from penstock.pipeline.run.folder import begin
from penstock.pipeline.run.start import laid_out, start
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.gpu_kinds import DEVICES, device_called
from tests.e2e.runs import QUICKSTART, ROOT
from tests.preflight.nvml import FakeNvml

BIG = ROOT / "configs" / "grpo-8b.yaml"
AUTO = "run.placement=auto"
ALONE = "trainer.algorithm.kl.coefficient=0"


def nvml(patch: pytest.MonkeyPatch, gpus: int) -> FakeNvml:
    return FakeNvml(patch, (80.0,) * gpus, "580.65.06", 13000)


def test_it_takes_what_the_plan_calls_the_first(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    nvml(monkeypatch, 8)
    choice = choose(load(BIG, [AUTO, ALONE]))
    taken = load(BIG, [AUTO, ALONE, *choice.overrides])
    engines = taken.rollout.count * taken.rollout.engine.vllm["tensor_parallel_size"]  # type: ignore[union-attr]
    assert taken.run.colocated and engines == taken.trainer.ranks == 8
    assert "8 x H100" in choice.line and "takes longest" in choice.line

    from penstock.pipeline.tools.plan import show

    show(Console(width=300), load(BIG, [ALONE]), "8xH100", None)
    first = capsys.readouterr().out.partition("take the first: ")[2].split()
    assert first == list(choice.overrides)


def test_a_run_is_laid_out_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    nvml(monkeypatch, 4)
    given = [AUTO, "trainer.ranks=99", "prompts.train={type: sort}", "prompts.eval=null"]
    with suppress(ConfigError, SetupError):  # the model is on the hub, which may not answer
        start(Console(), str(BIG), given, None, True)
    out = capsys.readouterr().out
    config, _, _ = laid_out(str(BIG), given, None)
    assert 1 <= config.trainer.ranks <= 4 and config.rollout.count >= 1
    assert f"trainer.ranks={config.trainer.ranks}" in out.partition("# changed: run.placement: auto takes ")[2]


def test_one_machine_is_one_node_and_as_large_as_its_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(monkeypatch, 16)
    choice = choose(load(BIG, [AUTO]))
    assert load(BIG, [AUTO, *choice.overrides]).trainer.nodes == 1
    assert not any(word.startswith("run.elsewhere") for word in choice.overrides)
    FakeNvml(monkeypatch, (79.6, 70.0), "580.65.06", 13000)
    choice = choose(load(ROOT / "configs" / "grpo-3b.yaml", [AUTO]))
    taken = load(ROOT / "configs" / "grpo-3b.yaml", [AUTO, *choice.overrides, "run.gpu_gib=70"])
    assert not plan(taken).problems and trainer_gib(shape_of(taken), taken.trainer, 70) <= 0.95 * 70


def test_with_no_gpu_or_a_tiny_model_it_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, path, said in ((0, BIG, "there is no GPU"), (1, QUICKSTART, "model.type=tiny fits anywhere")):
        nvml(monkeypatch, count)
        choice = choose(load(path, [AUTO]))
        assert choice.overrides == () and said in choice.line


def test_a_run_that_goes_on_elsewhere_is_laid_out_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def on(gpus: int, resume: Path | None = None, *more: str) -> Config:
        nvml(monkeypatch, gpus)
        config, origin, _ = laid_out(None if resume else str(BIG), [*more] if resume else [AUTO], resume)
        begin(config, tmp_path, origin)
        return config

    given, many = load(BIG), on(8)
    assert many.trainer != given.trainer
    alone = on(1, tmp_path)
    assert alone.trainer.ranks == alone.rollout.count == 1 and alone.trainer.offload and alone.run.colocated
    assert alone.rollout.engine.vllm["gpu_memory_utilization"] != 0.9  # type: ignore[union-attr]
    none = on(0, tmp_path)
    assert none.rollout.engine == given.rollout.engine
    assert none.trainer == given.trainer and none.run.placement == "auto"
    assert on(8, tmp_path).trainer == many.trainer and on(8, tmp_path).rollout == many.rollout
    own = on(8, tmp_path, "run.placement=as_given", "trainer.ranks=2")
    assert own.trainer.ranks == 2 and own.trainer.sequence_parallel == given.trainer.sequence_parallel


@pytest.mark.parametrize(
    ("given", "gib", "message"),
    [
        (["run.elsewhere=[rollout]"], 80.0, "of one machine"),
        ([], 10.0, "GPUs of one kind that is known"),
        (["rollout.engine.max_length=40000", "trainer.tokens_per_micro_batch=500000"], 80.0, "nothing fits 2 x H100"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(
    monkeypatch: pytest.MonkeyPatch, given: list[str], gib: float, message: str
) -> None:
    FakeNvml(monkeypatch, (gib, gib), "580.65.06", 13000)
    big = ROOT / "configs" / "grpo-32b.yaml"
    with pytest.raises(ConfigError, match=message):
        choose(load(big, [AUTO, "run.elsewhere=[]", *given]))


def test_gpus_are_known_by_what_the_driver_calls_them() -> None:
    names = {
        ("NVIDIA A100-SXM4-40GB", 40): "A100-40", ("NVIDIA A100-SXM4-80GB", 80): "A100", ("NVIDIA L4", 22.5): "L4",
        ("NVIDIA L40S", 45): "L40S", ("NVIDIA GeForce RTX 4090", 24): "RTX4090", ("NVIDIA H200", 140): "H200",
        ("NVIDIA H100 80GB HBM3", 79.6): "H100", ("NVIDIA A10G", 22.5): "A10",
        ("NVIDIA RTX A6000", 47.99): "RTXA6000", ("NVIDIA GeForce RTX 3090", 24): "RTX3090",
        ("NVIDIA GeForce RTX 5090", 31.8): "RTX5090",
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 95.6): "RTXPRO6000",
    }  # fmt: skip
    for (name, gib), wanted in names.items():
        assert device_called(name, gib) == DEVICES[wanted], name
        assert DEVICES[wanted].gib <= 1.01 * gib, "of what is sold as 24 GB the driver shows 22.5 GiB"
    assert device_called("NVIDIA L40", 45) is None and device_called("Tesla T4", 15) is None
