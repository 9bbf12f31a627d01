"""Fully sharded data parallelism (FSDP2): every process holds a fraction of each weight, gradient and optimizer state.

Owns how a model is sharded, filled from the main process, gathered and copied. `fully_shard` of torch does the rest:
it gathers the weights of a block before the block is computed, and reduces its gradients after the backward pass
(Zhao et al. 2023, https://arxiv.org/abs/2304.11277). Imported only by runs that shard: torch's part takes a second.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ..config import Config
from ..config.train import Precision
from ..errors import ConfigError
from ..models import DistilledViT, Model, build_model, optimize_for_cpu
from ..models.lora import add_lora
from .distributed import ProcessGroup
from .ema import local


class Sharding:
    """How the processes of a run share a model.

    Args:
        config: The configuration, with the model's actual architecture.
        group: The processes.
    """

    def __init__(self, config: Config, group: ProcessGroup) -> None:
        self.config, self.group = config, group
        self.mesh: DeviceMesh = init_device_mesh(group.device.type, (group.size,))

    def fully_shard(self, model: nn.Module, *, trained: bool) -> None:
        """Shard the weights of each block, then the rest; see `mixed_precision` for `trained`."""
        policy = mixed_precision(self.config.precision if trained else "fp32", self.group.device)
        for unit in [*sharded_units(model), model]:
            fully_shard(unit, mesh=self.mesh, reshard_after_forward=True, mp_policy=policy)

    def shard(self, model: Model, *, trained: bool) -> Model:
        """Shard a model in place: each block, then the rest, with the main process's values.

        The other processes may give a model on the meta device, so that only one of them needs memory for all of it.

        Args:
            model: The model.
            trained: Whether it is trained, within autocast, and not only evaluated.
        """
        if any(isinstance(module, _BatchNorm) for module in model.modules()):
            raise ConfigError(
                "parallel is fsdp, but the model has batch norm, whose statistics are not sharded. Use --parallel ddp.",
                code="unsupported_by_fsdp",
            )
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        values = {name: tensor.detach() for name, tensor in tensors.items()} if self.group.is_main else {}
        self.fully_shard(model, trained=trained)
        if isinstance(model, DistilledViT):
            register_fsdp_forward_method(model, "forward_distilled")
        if not self.group.is_main:
            model.to_empty(device=self.group.device)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            full = values.pop(name) if self.group.is_main else torch.empty(tensor.shape, dtype=tensor.dtype)
            full = full.to(self.group.device).contiguous()
            dist.broadcast(full, src=0)
            local(tensor.detach()).copy_(local(self.shard_like(tensor, full)))
        return model

    def copy(self, model: nn.Module) -> Model:
        """Return a sharded copy of a sharded model, in evaluation mode and without gradients."""
        with torch.device("meta"):
            copied = build_model(self.config.model)
            if self.config.lora_rank:
                add_lora(copied, self.config.lora_rank)
        optimize_for_cpu(copied)
        self.fully_shard(copied, trained=False)
        copied.to_empty(device=self.group.device)
        targets = [*copied.named_parameters(), *copied.named_buffers()]
        sources = [*model.named_parameters(), *model.named_buffers()]
        for (_, target), (_, source) in zip(targets, sources, strict=True):
            local(target.detach()).copy_(local(source.detach()))
        return copied.requires_grad_(False).eval()

    def shard_like(self, like: Tensor, value: Tensor) -> Tensor:
        """Shard a tensor, which every process has, like another; as it is if that is not sharded or of other shape."""
        if not isinstance(like, DTensor) or like.shape != value.shape:
            return value
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the whole of a tensor that may be sharded; all processes take part."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def gather_state(self, state: dict[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
        """Gather the tensors of a state dict on the CPU, one at a time; processes without `keep` get nothing."""
        whole = ((name, self.gather(tensor)) for name, tensor in state.items())
        return {name: tensor.detach().cpu() for name, tensor in whole if keep}


def mixed_precision(precision: Precision, device: torch.device) -> MixedPrecisionPolicy:
    """Return in which number format weights are gathered and gradients are reduced.

    In bf16 on an accelerator the weights of a model that is trained travel in bf16, at half the cost: inside autocast,
    which accepts a mixture. Gradients are always reduced in fp32, and models are evaluated in fp32. On a CPU weights
    stay in fp32: its layer norm does not accept a mixture, and autocast converts them as without sharding.
    """
    if precision == "bf16" and device.type == "cuda":
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    return MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)


def sharded_units(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules whose weights are gathered together: the blocks of a ViT, the units of a ResNet's stages."""
    yield from getattr(model, "blocks", ())
    for stage in getattr(model, "stages", ()):
        yield from stage
