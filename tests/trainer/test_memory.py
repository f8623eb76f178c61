"""Less memory, the same numbers: what selective checkpointing computes again, and what happens to what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.pipeline.bench.fake_memory import Memory
from penstock.services.learning import out_of_memory
from penstock.services.learning.out_of_memory import DoesNotFit
from penstock.services.modeling.packing import Rows
from penstock.services.modeling.parallel.fsdp import full
from penstock.services.modeling.parallel.start import load_trainable
from penstock.services.modeling.parallel.world import World
from penstock.services.modeling.resting import Resting
from penstock.services.modeling.tiled_mlp import tile_mlps
from penstock.services.trainer import learner as module
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from tests.trainer.rank_program import a_model
from tests.trainer.steps import a_step


def learner(**given: Any) -> Learner:
    return Learner(a_model(), TrainerConfig.model_validate({"optimizer": {"lr": 1e-2}, **given}), 1.0)


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def products(checkpointing: Any) -> tuple[int, float]:
    one = learner(gradient_checkpointing=checkpointing)
    with Products() as counted:
        loss, _ = one.accumulate(a_step(0))
    return counted.count, loss


def test_selective_checkpointing_computes_no_product_again() -> None:
    (none, loss), (some, second), (every, third) = products(False), products("selective"), products(True)
    assert none == some < every, "a full one computes each product twice"
    assert loss == second == third


def test_feed_forward_parts_in_tiles_have_less_at_once() -> None:
    rows = torch.arange(4096)[None] % 51

    def cost(tokens: int | None) -> tuple[int, int, list[torch.Tensor]]:
        model = a_model(intermediate_size=512, max_position_embeddings=8192)
        if tokens:
            tile_mlps(model, tokens, "trainer.tokens_per_mlp")
        memory, mlp = Memory(), model.model.layers[0].mlp
        hidden = model.model.embed_tokens(rows).detach().requires_grad_()
        with memory, Products() as counted:
            mlp(hidden).square().sum().backward()
        assert hidden.grad is not None
        return memory.peak, counted.count, [hidden.grad, *(p.grad for p in mlp.parameters() if p.grad is not None)]

    (whole, products, wanted), (tiled, more, found) = cost(None), cost(256)
    assert tiled < whole / 4 and more == products // 9 * (16 * 12), "of 16 tiles the forward is computed twice"
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


class Small:
    """A device on which a forward pass of more than ``limit`` tokens does not fit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
        self.failed, real = 0, module.forward_statistics

        def forward(model: Any, rows: Rows, *arguments: Any) -> torch.Tensor:
            if rows.tokens.numel() > limit:
                self.failed += 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore of it")
            return real(model, rows, *arguments)

        monkeypatch.setattr(module, "forward_statistics", forward)
        monkeypatch.setattr(out_of_memory, "LEAST_TOKENS", 8)


def test_what_does_not_fit_is_tried_again_with_smaller_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = learner(tokens_per_micro_batch=10_000)
    metrics = wanted.train(a_step(0))
    small = Small(monkeypatch, 30)
    found = learner(tokens_per_micro_batch=10_000)
    again = found.train(a_step(0))
    assert small.failed and found.micro_batches.tokens <= 39
    for name in ("loss", "grad_norm", "entropy"):
        assert again[name] == pytest.approx(metrics[name], rel=1e-4), name
    for name, parameter in wanted.parameters.items():
        torch.testing.assert_close(found.parameters[name], parameter, rtol=1e-3, atol=1e-4)
    failed = small.failed
    found.train(a_step(1))
    assert small.failed == failed, "the next step begins with what fits"


@pytest.mark.parametrize("more", [{}, {"offload": True, "sum_gradients": "step"}], ids=["", "sums kept whole"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_backward_that_does_not_fit_leaves_nothing_behind(
    more: dict[str, Any], dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP, which every bf16 model has around it, must sum the gradients of the second try and of later steps, and add
    nothing of the micro-batches before the one that failed."""
    a_model().save_pretrained(tmp_path)
    given = {"optimizer": {"lr": 1e-2}, **more}
    cpu, found = torch.device("cpu"), []
    world = World(cpu)
    for fails, tokens in ((False, 30), (True, 60)):
        config = TrainerConfig.model_validate({**given, "tokens_per_micro_batch": tokens})
        model = load_trainable(str(tmp_path), world, cpu, dtype, offload=config.weights_on_host)
        one = Learner(model, config, 1.0, world)
        layer, left = one.model.model.layers[0], [fails]

        def fail(module: Any, inputs: Any, output: Any, left: list[bool] = left) -> None:
            def hook(gradient: torch.Tensor) -> None:
                if left.pop() if left else False:
                    raise torch.OutOfMemoryError("CUDA out of memory.")

            if output.requires_grad:
                output.register_hook(hook)

        layer.register_forward_hook(fail)
        monkeypatch.setattr(out_of_memory, "LEAST_TOKENS", 8)
        found.append([one.train(a_step(number)) for number in range(3)])
        assert one.micro_batches.tokens == 30
    for clean, again in zip(*found, strict=True):
        for name in ("loss", "grad_norm"):
            assert again[name] == pytest.approx(clean[name], rel=1e-5), name


def test_where_it_may_not_shrink_the_error_says_what_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    Small(monkeypatch, 30)
    with pytest.raises(
        DoesNotFit, match=r"forward or backward pass, with micro-batches of 10000 tokens.*Tried to"
    ) as e:
        learner(tokens_per_micro_batch=10_000, halve_micro_batches=False).train(a_step(0))
    for key in ("gradient_checkpointing=true", "tokens_per_micro_batch", "trainer.ranks", "trainer.offload"):
        assert key in str(e.value)
    Small(monkeypatch, 1)
    with pytest.raises(DoesNotFit, match="micro-batches of 9 tokens"):
        learner(tokens_per_micro_batch=10_000).train(a_step(0))


def test_a_redo_does_not_depend_on_what_memory_is_free() -> None:
    assert TrainerConfig().pinned().sum_gradients == "micro_batch" and not TrainerConfig().pinned().halve_micro_batches
    assert TrainerConfig.model_validate({"sum_gradients": "step"}).pinned().sum_gradients == "step"


def test_what_never_changes_is_copied_once() -> None:
    resting = Resting(torch.device("cpu"))
    frozen, trained = (torch.arange(8.0) + start for start in (0, 100))
    copies = []

    class Copied(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            copies[-1] += str(function) == "aten.copy_.default"
            return function(*args, **(kwargs or {}))

    for turn in range(3):
        trained += 1
        copies.append(0)
        with Copied():
            resting.rest([trained, frozen], constant=[frozen[2:]])
        assert not frozen.untyped_storage().nbytes() and not trained.untyped_storage().nbytes()
        resting.wake()
        assert torch.equal(frozen, torch.arange(8.0)) and torch.equal(trained, torch.arange(8.0) + 101 + turn)
    assert copies == [2, 1, 1]


def test_one_rank_that_is_offloaded_sums_on_its_device_first(tmp_path: Path) -> None:
    """Else each micro-batch would bring its whole gradient to the host."""
    a_model().save_pretrained(tmp_path)
    found = {}
    for how in ("micro_batch", "step"):
        world = World(torch.device("cpu"))
        model = load_trainable(str(tmp_path), world, world.device, "float32", offload=True)
        given = {"offload": True, "sum_gradients": how, "tokens_per_micro_batch": 60}
        one = Learner(model, TrainerConfig.model_validate(given), 1.0, world)
        one.accumulate(a_step(0))
        found[how] = {name: full(parameter.grad) for name, parameter in one.parameters.items()}
        assert one.sums_once == (how == "step")
    for name, gradient in found["step"].items():
        torch.testing.assert_close(gradient, found["micro_batch"][name], rtol=1e-4, atol=1e-7, msg=name)
