"""Targets whose weights are split over processes: tensor parallelism of transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmspec.targets.readers.attention_tap import is_sharded

_KV_HEADS = "num_key_value_heads"


def sharding_options(processes: int) -> dict[str, Any]:
    """Arguments of `from_pretrained` that split a model over all processes, by its class's plan."""
    from transformers.distributed.configuration_utils import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=processes, tp_plan="auto")}


def check_sharded(model: Any, processes: int) -> None:
    """Refuse a loaded model that was not split over processes, or within heads. Raises ValueError.

    transformers splits an odd number of heads in the middle of one, which fails at the first token.
    """
    kind = type(model).__name__
    if not is_sharded(model):
        raise ValueError(
            f"this {kind} is not split over processes; drop --shard-target, or give the folder of "
            "a model of transformers whose class has a tensor parallel plan"
        )
    problem = find_indivisible(model.config.get_text_config(decoder=True), processes)
    if problem is not None:
        raise ValueError(f"{problem}; launch a number that divides it")


def find_indivisible(config: Any, processes: int) -> str | None:
    """Why the heads of a decoder cannot be shared by processes; None if they can."""
    for name in ("num_attention_heads", _KV_HEADS):
        count = vars(config).get(name)
        if count is not None and count % processes:
            return f"{name}={count} cannot be shared by {processes} processes"
    return None


def whole_weight(model: Any, weight: Tensor) -> Tensor:
    """A weight of a model, gathered from all processes if it is split; all must call it."""
    if not is_sharded(model):
        return weight
    from torch.distributed.tensor import DTensor

    return weight.full_tensor() if isinstance(weight, DTensor) else weight
