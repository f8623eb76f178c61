"""LoRA: small low-rank updates of a model's matrices are trained, and the model itself is not (Hu et al. 2021).

The layers are peft's. What they add to a matrix is known by rows, so that each rank makes its own rows of a version
that has them merged: engines are given whole weights, as of any other model, and need not know of adapters.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor

from penstock.services.modeling.adapter_files import CONFIG, FILE, check_addition, read_shape, write_base
from penstock.services.modeling.four_bit import FourBitLinear, in_four_bits
from penstock.services.modeling.layer_names import is_called, is_pattern
from penstock.services.modeling.load import empty_model
from penstock.services.modeling.parallel.fsdp import first_row, full, like
from penstock.services.modeling.parallel.stages import Stage
from penstock.services.modeling.towers import towers
from penstock.services.modeling.values import value_heads
from penstock.services.modeling.whole_weights import LENGTHS, A, B, merge
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.hub_names import named

NAME = "default"
"""What peft calls the one adapter."""
PREFIX = "base_model.model."
"""What peft's files put before a name."""

EXPERTS = {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""What peft takes for those of experts, wherever they are, in the families that it knows for mixtures."""

Variant = Literal["lora", "rslora", "dora"]


@dataclass(frozen=True)
class Adapter:
    """What is added to a model, and ``folder``, in peft's layout, that it begins as; None: it adds nothing yet."""

    rank: int
    alpha: int
    targets: tuple[str, ...]
    """Names of the layers, of what they end in, or patterns of them; none: all that are linear, but the head."""
    variant: Variant = "lora"
    folder: Path | None = None
    four_bits: bool = False
    """The matrices that it adds to lie in 4 bits."""
    exclude: tuple[str, ...] = ()
    """Which are left out of the targets, by the same kinds of names."""
    key: str = "trainer.lora"
    """The config's, for errors."""

    @classmethod
    def of(cls, config: Any, folder: Path | None = None, key: str = "trainer.lora") -> Adapter:
        """As the section ``config`` is, which ``key`` names, beginning as the one in ``folder``; None: as it says
        itself."""
        begun = folder or (Path(config.start) if config.start else None)
        four_bits = config.quantize == "nf4"
        return cls(config.rank, config.alpha, config.targets, config.variant, begun, four_bits, config.exclude, key)


PASSED_BY = (".mamba.out_proj", ".mixer.out_proj")
"""Layers of Mamba whose matrix a kernel is given, past whatever is put around it."""


def inject(model: Any, adapter: Adapter, base: str) -> None:
    """Puts peft's layers into ``model``, in place, on its device; everything else of it is frozen, but for a value
    head, which learns whole. ``base`` is where it came from, for who loads the adapter. Raises `SetupError`."""
    from peft import LoraConfig, inject_adapter_in_model

    # One that goes on has what it was made for, whichever layers a new one would have.
    begun, heads = read_shape(adapter.folder, adapter.key).targets if adapter.folder else (), list(value_heads(model))
    if adapter.folder:
        check_addition(adapter.folder, f"{adapter.key}.start")
    _check_called(model, adapter)
    targets = _chosen(model, list(adapter.targets or begun) or _all_linear(model, adapter.key), adapter)
    name, revision = named(base)
    config = LoraConfig(
        r=adapter.rank, lora_alpha=adapter.alpha, target_modules=targets,
        use_rslora=adapter.variant == "rslora", use_dora=adapter.variant == "dora",
        task_type="TOKEN_CLS" if heads else "CAUSAL_LM",
        exclude_modules="|".join(rf"{re.escape(name)}(\..*)?" for name in towers(model)) or None,
        base_model_name_or_path=str(Path(base).resolve()) if Path(base).is_dir() else name, revision=revision,
    )  # fmt: skip
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:  # one that cannot be adapted
        raise SetupError(f"{adapter.key}.targets: {' '.join(str(error).split())[:300]}") from error
    model.penstock_adapter_key = adapter.key
    model.peft_config[NAME].modules_to_save = heads or None  # what peft calls such layers, in its files too
    for name, layer in model.named_modules():
        if not hasattr(layer, "lora_A"):
            continue
        if name in heads:
            raise SetupError(f"{adapter.key}.targets: {name}, the head, learns whole; name others")
        if name.endswith(PASSED_BY):
            raise SetupError(f"{adapter.key}.targets: {name}: its kernel is given its matrix alone; name others")
        if type(layer.base_layer) is not torch.nn.Linear:
            said = f"{name} is a {type(layer.base_layer).__name__}; only linear layers can be merged: name others"
            raise SetupError(f"{adapter.key}.targets: {said}")
    if adapter.four_bits:
        in_four_bits(model, [f"{name}.base_layer" for name in _adapted_in_four_bits(model)])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(learns(model, name))
        if parameter.requires_grad:  # peft makes them as the matrix is; they are trained, so they are whole
            parameter.data = parameter.data.float()


@contextmanager
def without_adapter(model: Any) -> Iterator[None]:
    """Meanwhile ``model`` computes as it did before `inject`."""
    layers = [layer for layer in model.modules() if hasattr(layer, "lora_A")]
    try:
        for layer in layers:  # peft's own switch would also have parameters learn no more
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _check_called(model: Any, adapter: Adapter) -> None:
    """Raises `SetupError` where one of the layers that the config names is none: peft would do without it."""
    every = {name: type(module) is torch.nn.Linear for name, module in model.named_modules() if name}
    for key, wanted in (("targets", adapter.targets), ("exclude", adapter.exclude)):
        for each in wanted:
            if not any(is_called(name, [each]) for name in every):
                known = sorted({name.rpartition(".")[2] for name, linear in every.items() if linear})
                said = f"no layer is called {each}; linear ones are {', '.join(known)}"
                raise SetupError(f"{adapter.key}.{key}: {said}")


def _chosen(model: Any, targets: list[str], adapter: Adapter) -> list[str]:
    """``targets`` as peft takes them: as they are, or, where they are patterns or some are to be left out, the whole
    names of the layers that are meant. Raises `SetupError` where there are none."""
    exclude, key = adapter.exclude, adapter.key
    if not exclude and not any(is_pattern(each) for each in targets):
        return targets
    every = {name: type(module) is torch.nn.Linear for name, module in model.named_modules() if name}
    plain = [each for each in targets if not is_pattern(each)]
    found = [name for name, linear in every.items() if is_called(name, targets if linear else plain)]
    if left := [name for name in found if not is_called(name, exclude)]:
        return left
    raise SetupError(
        f"{key}.exclude: nothing is left of the targets; name fewer"
        if found
        else f"{key}.targets: no linear layer is called {targets[0]}"
    )


def _adapted_in_four_bits(model: Any) -> list[str]:
    found = {name: layer for name, layer in model.named_modules() if hasattr(layer, "lora_A")}
    for name, layer in found.items():
        if layer is model.get_output_embeddings():
            raise SetupError(f"trainer.lora.quantize: {name}, the head, stays whole; take it out of the targets")
    return list(found)


def adapted_layers(adapter: Adapter, base: str) -> list[str]:
    """Names of the layers of the model at ``base`` that ``adapter`` adds to, and which may lie in 4 bits. Raises
    `SetupError`."""
    model = empty_model(base)
    inject(model, adapter, base)
    return _adapted_in_four_bits(model)


def _all_linear(model: Any, key: str) -> list[str]:
    """Names of all that are linear layers, but the head; of a mixture those outside its feed-forward blocks, since peft
    would adapt experts as well, and nobody could merge them."""
    heads = (model.get_output_embeddings(), *value_heads(model).values())
    beside = {id(m) for tower in towers(model).values() for m in tower.modules()}
    linear = {True: set[str](), False: set[str]()}
    blocks = tuple(name.removesuffix("experts") for name, _ in model.named_modules() if name.endswith(".experts"))
    for name, module in model.named_modules():
        if id(module) not in beside and name:
            plain = type(module) is torch.nn.Linear and module not in heads and not name.endswith(PASSED_BY)
            linear[plain and not (blocks and name.startswith(blocks))].add(name)
    if not linear[True]:
        raise SetupError(
            f"{key}: {model.config.model_type} has no linear layers that could be merged; train it whole "
            f"({key}: null), or take another model"
        )
    others = {name.rpartition(".")[2] for name in linear[False]}
    found = {name: name.rpartition(".")[2] for name in linear[True]}
    if blocks:
        found = {name: end for name, end in found.items() if end not in EXPERTS}
    # peft goes by how a name ends.
    return sorted({name if end in others or end.isdigit() else end for name, end in found.items()})


def is_adapters(name: str) -> bool:
    """A parameter is the adapter's, by its ``name``."""
    return ".lora_" in name


def learns(model: Any, name: str) -> bool:
    """A parameter of ``model`` is the adapter's, by its ``name``, or of a head that learns whole beside it."""
    return is_adapters(name) or name.rpartition(".")[0] in (model.peft_config[NAME].modules_to_save or ())


def plain_name(name: str) -> str:
    """What a parameter is called where there is no adapter."""
    return name.replace(".base_layer.", ".")


def file_name(name: str) -> str:
    """What a parameter of the adapter is called in peft's files."""
    name = name.removesuffix(f".{NAME}.weight") if "magnitude" in name else name.replace(f".{NAME}.", ".")
    return PREFIX + name


@torch.no_grad()
def begin(model: Any, adapter: Adapter) -> None:
    """Fills the adapter's parameters, each rank its own rows: from ``adapter.folder``, or so that nothing is added:
    B is 0, A random (by its name, as `torch.nn.Linear` begins), DoRA's lengths those of the matrix's rows. A head that
    learns beside it stays what it is, unless the folder has it."""
    layers = dict(model.named_modules())
    if adapter.folder is not None:
        _read(model, adapter.folder, adapter.key)
        return
    for name, parameter in model.named_parameters():
        if not is_adapters(name):
            continue
        mine = _mine(parameter)
        if ".lora_B." in name:
            mine.zero_()
        elif ".lora_A." in name:
            random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            bound = 1 / math.sqrt(parameter.shape[1])
            whole = torch.empty(parameter.shape).uniform_(-bound, bound, generator=random)
            mine.copy_(_mine(like(parameter, whole)))
        else:
            mine.copy_(_mine(layers[name.split(".lora_")[0]].base_layer.weight).float().norm(dim=1))


def _read(model: Any, folder: Path, key: str) -> None:
    try:
        with safe_open(folder / FILE, framework="pt") as file:
            names = set(file.keys())
            stage: Stage | None = getattr(model, "penstock_stage", None)
            known = stage.names if stage else [name for name, _ in model.named_parameters()]
            if extra := names - {file_name(name) for name in known if learns(model, name)}:
                raise SetupError(
                    f"{key}: {folder / FILE} has {min(extra)}, which this adapter has not: give it the targets "
                    "and the variant of that one"
                )
            for name, parameter in model.named_parameters():
                if not learns(model, name):
                    continue
                if file_name(name) not in names:
                    raise SetupError(f"{key}: {folder / FILE} has no {file_name(name)}: other targets?")
                found = file.get_tensor(file_name(name))
                if found.shape != parameter.shape:
                    raise SetupError(
                        f"{key}.rank: {folder / FILE}: {file_name(name)} has shape {tuple(found.shape)}, "
                        f"this adapter's has {tuple(parameter.shape)}"
                    )
                _mine(parameter).copy_(_mine(like(parameter, found)))
    except SetupError:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        raise SetupError(f"{key}: cannot read {folder / FILE}: {error}") from error


class Merged:
    """A matrix with what its adapter adds, as it is whenever it is asked for; this rank's rows of it."""

    def __init__(self, layer: Any) -> None:
        self._base = layer.base_layer
        # Asked for later, it might be what FSDP has gathered for the step that is being computed meanwhile.
        self._matrix = None if isinstance(self._base, FourBitLinear) else self._base.weight
        self._a, self._b = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
        self._scale = float(layer.scaling[NAME])
        lengths = getattr(layer, "lora_magnitude_vector", {})
        self._lengths = lengths[NAME].weight if NAME in lengths else None
        self.shape, self.device = torch.Size((self._b.shape[0], self._a.shape[1])), self._b.device
        self.gather()

    @property
    def first(self) -> int:
        """The number of its first row."""
        return first_row(self._b)

    def gather(self) -> None:
        """Every rank needs all of A: to be called by all of them, when it has changed."""
        self._whole_a = full(self._a.detach())

    @torch.no_grad()
    def local(self) -> torch.Tensor:
        """float32, flat: elements in the order of the whole matrix."""
        lengths = None if self._lengths is None else _mine(self._lengths)
        return merge(self._rows().float(), self._whole_a, _mine(self._b), lengths, self._scale).reshape(-1)

    def _rows(self) -> torch.Tensor:
        if self._matrix is not None:
            return _mine(self._matrix)
        first, rows = self.first, _mine(self._b).shape[0]
        return self._base.matrix()[first : first + rows].to(self.device)  # the rest may lie on the host


class Scaled:
    """A matrix times a number, as it is whenever it is asked for; this rank's rows of it."""

    def __init__(self, parameter: torch.Tensor, scale: float) -> None:
        self._parameter, self._scale = parameter, scale
        self.shape, self.device = parameter.shape, parameter.device

    @property
    def first(self) -> int:
        """The number of its first row."""
        return first_row(self._parameter)

    def gather(self) -> None:
        """Nothing: each rank has what it sends."""

    @torch.no_grad()
    def local(self) -> torch.Tensor:
        """float32, flat: elements in the order of the whole matrix."""
        return (_mine(self._parameter) * self._scale).reshape(-1)


def _mine(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's rows, of the same memory."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


class Adapted:
    """What is published and saved of a model that `inject` has changed."""

    def __init__(self, model: Any, parameters: dict[str, torch.nn.Parameter]) -> None:
        self.config = model.peft_config[NAME]
        layers = {name: layer for name, layer in model.named_modules() if hasattr(layer, "lora_A")}
        self._layers = {f"{name}.base_layer.weight": layer for name, layer in layers.items()}
        self._whole: dict[str, torch.nn.Parameter | None] = {}
        for prefix, module in model.named_modules():  # in the model's order, by which engines load layer after layer
            if isinstance(module, FourBitLinear):
                self._whole[f"{prefix}.weight"] = None
            names = (f"{prefix}.{name}".lstrip(".") for name in module._parameters)
            self._whole |= {name: parameters[name] for name in names if name in parameters and not is_adapters(name)}
        if tied := self._layers.keys() - self._whole.keys():
            name, key = min(tied).removesuffix(".base_layer.weight"), model.penstock_adapter_key
            raise SetupError(
                f"{key}.targets: {name} shares its matrix with another layer (tie_word_embeddings), which would change "
                "with it; name other layers"
            )
        self.alone: dict[str, torch.Tensor | Scaled] = {}
        """The adapter, by the names that `whole_weights` knows, which makes the same of it."""
        for name, layer in layers.items():
            self.alone[name + A] = layer.lora_A[NAME].weight
            self.alone[name + B] = Scaled(layer.lora_B[NAME].weight, float(layer.scaling[NAME]))
            if NAME in (lengths := getattr(layer, "lora_magnitude_vector", {})):
                self.alone[name + LENGTHS] = lengths[NAME].weight
        self.saved = {file_name(name): p for name, p in parameters.items() if learns(model, name)}
        """By the names that peft's files have."""

    @cached_property
    def published(self) -> dict[str, torch.Tensor | Merged]:
        """By the names that the model has without the adapter. All ranks must ask at once."""
        return {
            plain_name(name): Merged(self._layers[name]) if name in self._layers else parameter
            for name, parameter in self._whole.items()
        }

    def write_config(self, folder: Path) -> None:
        """What peft and transformers know the files beside it by."""
        about = {k: sorted(v) if isinstance(v, set) else v for k, v in self.config.to_dict().items()}
        (folder / CONFIG).write_text(json.dumps(about | {"inference_mode": True}, indent=2, default=str) + "\n")
        base = next(iter(self._layers.values())).base_layer
        if isinstance(base, FourBitLinear):
            write_base(folder, str(base.dtype).removeprefix("torch."))
