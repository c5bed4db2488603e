"""Pipelines of diffusers with quantized denoising networks; other parts stay as they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmspec.models.placement import Placement

DENOISERS = ("unet", "transformer")  # and further experts, such as transformer_2


def find_denoisers(parts: Iterable[str]) -> list[str]:
    """The names of denoising networks among the parts of a pipeline."""
    further = tuple(f"{one}_" for one in DENOISERS)
    return [name for name in parts if name in DENOISERS or name.startswith(further)]


def quantize_on_load(source: str, placement: Placement) -> Any:
    """The quantization of a pipeline as its `from_pretrained` takes it.

    Raises ValueError for a quantizer that pipelines do not take.
    """
    import diffusers

    _check_quantizer(placement)
    own = find_denoisers(diffusers.DiffusionPipeline.load_config(source))
    return diffusers.PipelineQuantizationConfig(
        quant_mapping={name: placement.quantization(diffusers) for name in own}
    )


def quantize_in_place(pipe: Any, placement: Placement) -> Any:
    """The loaded pipeline, its networks quantized. Raises ValueError as `quantize_on_load`."""
    _check_quantizer(placement)
    import diffusers
    from torchao.quantization import quantize_

    config = placement.quantization(diffusers).quant_type
    for name in find_denoisers(pipe.components):
        quantize_(getattr(pipe, name), config)
    return pipe


def _check_quantizer(placement: Placement) -> None:
    name = str(placement.quantize)
    if name.startswith("bnb-"):
        raise ValueError(
            f"quantize={name!r} is not supported for pipelines of diffusers; give int8 or int4, or "
            "load the pipeline in Python, with its BitsAndBytesConfig"
        )
