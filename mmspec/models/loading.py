"""Load models and pipelines from folders: complete, safetensors only, without remote code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as VISION,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES as MULTIMODAL,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES as SPEECH,
)

from mmspec.errors import explain_load_errors
from mmspec.models.folder import check_folder_exists, read_json, read_shapes

if TYPE_CHECKING:
    from mmspec.models.placement import Placement


def load_text_processor(folder: str | None, maker: Any, kind: str) -> Any:
    """Load the `kind` (tokenizer, processor) in a model's folder by the class `maker`.

    Raises ValueError without a folder.
    """
    if folder is None:
        raise ValueError(
            f"the folder of the model's {kind} is unknown; give it once, as accelerate(model, "
            "processor=...), or give tensors instead"
        )
    with explain_load_errors(folder, kind):
        return maker.from_pretrained(folder, trust_remote_code=False)


def load_causal(
    source: str | Path,
    dtype: torch.dtype | str = "auto",
    maker: Any = None,
    placement: Placement | None = None,
    **arguments: Any,
) -> Any:
    """Load a model in eval mode from a folder or a hub name, by `maker` or the Auto classes.

    Remote code is not run unless trust_remote_code=True is given; there is no prompt for it. Raises
    ValueError for pickled weights (unpickling runs code), for missing weights, and for a
    `placement` that the class refuses.
    """
    name = str(source)
    arguments = {"trust_remote_code": False, **arguments}
    placed: dict[str, Any] = {}
    if placement is not None:
        dtype, placed = placement.torch_dtype or dtype, placement.keywords()
    check_folder_exists(name)
    if Path(name).is_dir():
        check_folder(Path(name))
    explained = nullcontext() if placement is None else placement.explain(name)
    with explain_load_errors(name), explained:
        if maker is None:
            register_own_model(name, **arguments)
            maker = auto_class(transformers.AutoConfig.from_pretrained(name, **arguments))
        model, found = maker.from_pretrained(
            name,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            **{"ignore_mismatched_sizes": True, **placed, **arguments},  # refused below, by name
        )
    if not arguments.get("ignore_mismatched_sizes"):
        _check_sizes(name, found["mismatched_keys"])
    missing = sorted(found["missing_keys"])
    if missing:
        some = ", ".join(missing[:3])
        raise ValueError(
            f"{name} has no weights for {len(missing)} parts of a {type(model).__name__} ({some}), "
            "which would be random; give the folder of a complete model"
        )
    return (model if placement is None else placement.finish(model)).eval()


def load_model(maker: Any, folder: str | Path, kind: str, dtype: torch.dtype | None = None) -> Any:
    """Load a model of this package in eval mode, as it was saved or in `dtype`.

    `kind` describes it in errors. Raises ValueError where the folder holds another kind of model.
    """
    check_folder_exists(str(folder), kind)
    check_folder(Path(folder))
    with explain_load_errors(folder, kind):
        model, found = maker.from_pretrained(
            folder,
            dtype=dtype or "auto",
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
        )
    wrong = sorted({*found["missing_keys"], *found["unexpected_keys"]})
    wanted, given = maker.config_class.model_type, model_type(folder)
    is_known = given in (None, wanted) or given in transformers.CONFIG_MAPPING  # as published heads
    if (wrong or found["mismatched_keys"]) and not is_known:
        raise ValueError(
            f"{folder} holds a model of type {given!r}, no {kind} ({wanted!r}); give a folder "
            f"written by {maker.__name__}.save_pretrained, or choose a recipe that takes {given!r}"
        )
    _check_sizes(folder, found["mismatched_keys"])
    if wrong:
        raise ValueError(
            f"{folder} is no {kind}: {', '.join(wrong[:3])} is missing or unexpected; give a "
            f"folder written by {maker.__name__}.save_pretrained"
        )
    return model.train(False)


def _check_sizes(folder: str | Path, found: Iterable[tuple[Any, ...]]) -> None:
    """Refuse weights of other sizes than config.json has. Raises ValueError."""
    wrong = sorted((name, tuple(there), tuple(here)) for name, there, here in found)
    if wrong:
        name, there, here = wrong[0]
        raise ValueError(
            f"{folder} does not fit together: {name} is {there}, and {here} by config.json "
            f"({len(wrong)} such weights); copy both files again from one model"
        )


def random_model(make: Callable[[], Any], seed: int) -> Any:
    """Make a model with random weights, in float32 and eval mode, for certificates and tests.

    Wide matrices make its distributions neither flat nor peaked, and dependent on every input.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make().float().eval()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() == 2:
                    weight.normal_(0.0, 1.2 / weight.shape[1] ** 0.5)
    return model


OWN_MODELS = {  # text models of this package: `model_type` -> module
    "prismatic": "mmspec.models.prismatic",
    "openvla": "mmspec.models.prismatic",
}


def register_own_model(source: str | Path, **options: Any) -> None:
    """Register the model class with the Auto classes, if `source` holds a model of this package."""
    found, _ = transformers.PretrainedConfig.get_config_dict(str(source), **options)
    module = OWN_MODELS.get(found.get("model_type", ""))
    if module is not None:
        import_module(module).register()


def auto_class(config: Any) -> Any:
    """Return the Auto class of a configuration, with the encoder unless it was not saved."""
    kind, (architecture, *_) = config.model_type, config.architectures or ("",)
    if kind in VISION or kind in OWN_MODELS:
        return transformers.AutoModelForImageTextToText
    if kind in SPEECH and not architecture.endswith("ForCausalLM"):
        return transformers.AutoModelForSpeechSeq2Seq
    if kind in MULTIMODAL and kind not in CAUSAL:
        return transformers.AutoModelForMultimodalLM
    return transformers.AutoModelForCausalLM


def model_type(source: str | Path) -> str | None:
    """Return the `model_type` of the configuration in a folder or under a hub name."""
    check_folder_exists(str(source))
    if Path(source).is_dir():
        check_folder(Path(source))
        own: str | None = read_json(Path(source) / "config.json").get("model_type")
        return own
    with explain_load_errors(source):
        found, _ = transformers.PretrainedConfig.get_config_dict(str(source))
    hub_type: str | None = found.get("model_type")
    return hub_type


def check_folder(folder: Path) -> None:
    """Check that a folder holds a model in intact safetensors. Raises ValueError."""
    if not (folder / "config.json").exists():
        raise ValueError(
            f"{folder} is not a model folder: it has no config.json; give one that "
            "save_pretrained wrote"
        )
    read_json(folder / "config.json")
    read_shapes(folder)


def is_pipeline(model: Any) -> bool:
    """Whether this is a diffusers pipeline, by class name, as diffusers may not be imported yet."""
    return any(base.__name__ == "DiffusionPipeline" for base in type(model).__mro__)


def load_pipeline(
    source: str | Path,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    placement: Placement | None = None,
) -> Any:
    """Load a pipeline from a folder or a hub name; safetensors only.

    Raises ValueError for a missing folder, and for a device map or quantization that diffusers
    refuses.
    """
    from diffusers import DiffusionPipeline

    name = str(source)
    check_folder_exists(name, "pipeline")
    placed: dict[str, Any] = {}
    if placement is not None:
        placed = {"device_map": placement.device_map}
        if placement.quantize is not None:
            placed["quantization_config"] = placement.pipeline_quantization(name)
            dtype = dtype or torch.float32  # of all parts, else diffusers chooses one per part
    explained = nullcontext() if placement is None else placement.explain(name)
    with explain_load_errors(name, "pipeline"), explained:
        pipe = DiffusionPipeline.from_pretrained(
            name,
            torch_dtype=dtype,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            **placed,
        )
    return pipe if placement is None else placement.finish(pipe)


def load_network(source: str | Path, dtype: torch.dtype | None = None) -> Any:
    """Load a denoising network from a folder; safetensors only."""
    from diffusers import AutoModel, ModelMixin

    read_shapes(Path(source))
    with explain_load_errors(source, "denoiser"):
        model = AutoModel.from_pretrained(str(source), torch_dtype=dtype, use_safetensors=True)
    if not isinstance(model, ModelMixin):
        raise ValueError(
            f"{source} holds a {type(model).__name__}, not a denoiser; give a network or a "
            "pipeline of diffusers"
        )
    return model.eval()
