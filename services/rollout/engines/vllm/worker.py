"""What runs in vLLM's workers: receives versions beside generation, and loads one while the engine is paused."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.utils.nccl import unpinned_nccl_env

from penstock.protocols.keys import ClientKeys
from penstock.protocols.versions import Layout
from penstock.services.modeling.experts import as_in_files
from penstock.services.modeling.lora import PREFIX
from penstock.services.modeling.whole_weights import A, AdapterBase, is_alone
from penstock.services.rollout.engines.base import refuse_partial
from penstock.services.rollout.engines.vllm.expert_layers import load_whole_layers
from penstock.services.rollout.engines.vllm.plugin import ADAPTER
from penstock.services.runtime import hub_names, own_code
from penstock.services.weights.buffers import Mappings
from penstock.services.weights.config import WeightsConfig
from penstock.services.weights.layout import view_weights
from penstock.services.weights.receiver.worker_receiver import WorkerReceiver
from penstock.services.weights.transports import nccl


@dataclass
class ShadowInit(WeightTransferInitInfo):
    """Nothing: the workers meet nobody, they map what their rollout holds."""


@dataclass
class ShadowUpdate(WeightTransferUpdateInfo):
    """Where the version lies: `services.rollout.weights.receiver.loader.MappedVersion`, with the layout as JSON."""

    path: str = ""
    offset: int = 0
    layout: str = ""
    epoch: int = -1
    """With an empty ``path``: it is what this worker has received by itself, as ``version`` of this epoch."""
    version: int = -1


class ShadowTransfer(WeightTransferEngine[ShadowInit, ShadowUpdate]):
    """Loads whole versions, layer by layer, each worker the part that is its own. Registered with vLLM's registry."""

    init_info_cls = ShadowInit
    update_info_cls = ShadowUpdate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._mappings = Mappings()
        self.receiver: WorkerReceiver | None = None
        """Once its rollout has had it join."""
        self._awaited: set[str] = set()
        own_code.trust(self.model_config.trust_remote_code)
        self._path = hub_names.joined(self.model_config.model, self.model_config.revision)
        self._base = AdapterBase(self._path, str(self.model_config.dtype).removeprefix("torch."))
        # It warns of layers that have nothing to load, at every version; what is missing is found below.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

    def init_transfer_engine(self, init_info: ShadowInit) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Puts the model's layers aside, to be filled anew."""
        names = (name.replace(".base_layer.", ".") for name, _ in self.model.named_parameters())  # as LoRA wraps them
        self._awaited = {name for name in names if name.endswith(("weight", "bias")) and ".lora_" not in name}
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base's, which waits for an accelerator that a CPU has not."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def receive_weights(self, update_info: ShadowUpdate) -> None:
        """Loads all weights. A version is whole, so projections that vLLM fuses arrive together."""
        weights = self._base.whole(self._tensors(update_info), self.device)
        refuse_partial(weights.keys(), self._path)
        family = self.model_config.hf_config.model_type
        rest, filled = load_whole_layers(self.model, family, weights)
        loaded = self.model.load_weights(as_in_files(family, rest))
        if loaded is not None and (missing := self._awaited - loaded - filled):
            raise ValueError(f"the version does not fill {', '.join(sorted(missing)[:3])} of vLLM's model")

    def _tensors(self, update_info: ShadowUpdate) -> Mapping[str, torch.Tensor]:
        """Of the version, as it was published."""
        if update_info.path:
            layout = Layout.model_validate_json(update_info.layout)
            buffer = self._mappings.map(update_info.path, update_info.offset, layout.nbytes)
            return view_weights(layout, buffer)
        assert self.receiver
        return self.receiver.take(update_info.epoch, update_info.version)

    def lay_beside(self, manager: Any, update_info: ShadowUpdate) -> None:
        """Has vLLM's ``manager`` of adapters take the version in the place of the one before. Raises `ValueError` where
        it is no adapter, or adds to what vLLM's model has not."""
        tensors = self._tensors(update_info)
        if not is_alone(tensors):
            raise ValueError("the version is a whole model, and rollout.engine.adapter=beside wants an adapter alone")
        layers = [name.removesuffix(A) for name in tensors if name.endswith(A)]
        rank = max(tensors[layer + A].shape[0] for layer in layers)
        helper = PEFTHelper(r=rank, lora_alpha=rank, target_modules=sorted({n.rpartition(".")[2] for n in layers}))
        inner, mapper = manager._adapter_manager, getattr(self.model, "hf_to_vllm_mapper", None)
        found = LoRAModel.from_lora_tensors(
            ADAPTER, {PREFIX + name: tensor.clone() for name, tensor in tensors.items()}, helper, "cpu",
            manager.lora_config.lora_dtype, weights_mapper=mapper.get_rename_mapper() if mapper else None,
        )  # fmt: skip
        inner.remove_adapter(ADAPTER)
        inner.add_adapter(found)
        inner.activate_adapter(ADAPTER)
        if lacking := [name for name in found.loras if name not in inner.modules]:
            raise ValueError(f"the version's adapter adds to {lacking[0]}, which vLLM's model has not")
        if self.receiver:
            self.receiver.done()

    def finish_weight_update(self) -> None:
        """Brings the layers into the form that kernels want."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _pack_heads(self.model)
            _pack_experts(self.model)
        if self.receiver:
            self.receiver.done()

    def shutdown(self) -> None:
        """Lets go of the mappings, and of the weight channel."""
        self._mappings = Mappings()
        if self.receiver:
            self.receiver.close()


def _pack_heads(model: torch.nn.Module) -> None:
    """On a CPU a head that is tied to the embedding is packed apart, and a reload does not notice."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def _pack_experts(model: torch.nn.Module) -> None:
    """On a CPU experts are packed where their kernel is made: a reload, which keeps that, leaves them plain."""
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)


class Extension:
    """Methods that vLLM's workers get on top of their own (``worker_extension_cls``)."""

    def penstock_load(self: Any, update_info: dict[str, Any], beside: bool) -> None:
        """One whole update in one call, so that nothing can come between its parts; ``beside``: of an adapter that is
        not merged."""
        if beside:
            transfer = self.weight_transfer_engine
            transfer.lay_beside(self.model_runner.lora_manager, transfer.parse_update_info(update_info))
            return
        self.start_weight_update()
        self.update_weights(update_info)
        self.finish_weight_update()

    def penstock_join(self: Any, address: str, config: str, keys: dict[str, str] | None) -> None:
        """From now on this worker receives versions: it connects to its rollout's desk."""
        weights = WeightsConfig.model_validate_json(config)
        pair = ClientKeys(**keys) if keys else None
        nccl.around_meeting = unpinned_nccl_env  # what vLLM sets for its own groups, the trainer has not
        receiver = WorkerReceiver(address, f"worker-{self.rank}-{os.getpid()}", weights, pair, self.device)
        self.weight_transfer_engine.receiver = receiver

    def penstock_reload(self: Any, weights_path: str) -> None:
        """vLLM's own ``reload_weights`` from a folder, right for tied heads on a CPU too (vLLM's server)."""
        self.model_runner.reload_weights(weights_path=weights_path)
        if self.device.type == "cpu":
            _pack_heads(self.model_runner.get_model())
