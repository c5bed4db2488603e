"""Models and pipelines from folders: safetensors only, whole, and no code of theirs."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

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
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES as HEARING,
)

from mmspec.errors import reading
from mmspec.models.folder import check_there, configuration, tensors


def word_reader(folder: str | None, maker: Any, kind: str) -> Any:
    """The `kind` (a tokenizer, a processor) beside a model's weights, read by `maker`.

    Raises ValueError where there is none.
    """
    if folder is None:
        raise ValueError(
            f"nobody says where the model's {kind} lies; give it once, as accelerate(model, "
            "processor=...), or give the tensors that it makes"
        )
    with reading(folder, kind):
        return maker.from_pretrained(folder, trust_remote_code=False)


def load_causal(
    source: str | Path, dtype: torch.dtype | str = "auto", maker: Any = None, **arguments: Any
) -> Any:
    """A model in eval mode, from a folder or a hub name; by `maker`, or as transformers files it.

    Nobody is asked on a terminal: code that lies beside the weights is not run, unless
    trust_remote_code=True is given. Raises ValueError for a folder whose weights are pickled
    (unpickling runs code), and for weights that leave parts of the model untrained.
    """
    name = str(source)
    arguments = {"trust_remote_code": False, **arguments}
    check_there(name)
    if Path(name).is_dir():
        check_folder(Path(name))
    with reading(name):
        if maker is None:
            introduce(name, **arguments)
            maker = auto_class(transformers.AutoConfig.from_pretrained(name, **arguments))
        model, found = maker.from_pretrained(
            name, dtype=dtype, use_safetensors=True, output_loading_info=True, **arguments
        )
    missing = sorted(found["missing_keys"])
    if missing:
        some = ", ".join(missing[:3])
        raise ValueError(
            f"{name} has no weights for {len(missing)} parts of a {type(model).__name__} ({some}), "
            "which would be random; give the folder of a whole model"
        )
    return model.eval()


OURS = {  # models of this package that read and write text, by `model_type`
    "prismatic": "mmspec.models.prismatic",
    "openvla": "mmspec.models.prismatic",
}


def introduce(source: str | Path, **options: Any) -> None:
    """Tell the Auto classes of transformers of a model of ours, where `source` holds one."""
    found, _ = transformers.PretrainedConfig.get_config_dict(str(source), **options)
    home = OURS.get(found.get("model_type", ""))
    if home is not None:
        import_module(home).register()


def auto_class(config: Any) -> Any:
    """What transformers files a model under: with its encoder, but for a decoder saved alone."""
    kind, (named, *_) = config.model_type, config.architectures or ("",)
    if kind in VISION or kind in OURS:
        return transformers.AutoModelForImageTextToText
    if kind in HEARING and not named.endswith("ForCausalLM"):
        return transformers.AutoModelForSpeechSeq2Seq
    if kind in MULTIMODAL and kind not in CAUSAL:
        return transformers.AutoModelForMultimodalLM
    return transformers.AutoModelForCausalLM


def model_type(source: str | Path) -> str | None:
    """The `model_type` of a folder's or a hub name's configuration."""
    check_there(str(source))
    if Path(source).is_dir():
        check_folder(Path(source))
        own: str | None = configuration(Path(source) / "config.json").get("model_type")
        return own
    with reading(source):
        found, _ = transformers.PretrainedConfig.get_config_dict(str(source))
    named: str | None = found.get("model_type")
    return named


def check_folder(folder: Path) -> None:
    """Refuse what is no model, pickled or damaged weights. Raises ValueError, naming the file."""
    if not (folder / "config.json").exists():
        raise ValueError(
            f"{folder} is not a model folder: it has no config.json; give one that "
            "save_pretrained wrote"
        )
    configuration(folder / "config.json")
    tensors(folder)


def is_pipeline(model: Any) -> bool:
    """Whether this is a diffusers pipeline (asked by name: diffusers may not be loaded yet)."""
    return any(base.__name__ == "DiffusionPipeline" for base in type(model).__mro__)


def load_pipeline(
    source: str | Path, dtype: torch.dtype | None = None, trust_remote_code: bool = False
) -> Any:
    """A pipeline from a folder or a hub name; safetensors only.

    Raises ValueError where a folder is meant and there is none.
    """
    from diffusers import DiffusionPipeline

    name = str(source)
    check_there(name, "pipeline")
    with reading(name, "pipeline"):
        return DiffusionPipeline.from_pretrained(
            name, torch_dtype=dtype, use_safetensors=True, trust_remote_code=trust_remote_code
        )


def load_network(source: str | Path, dtype: torch.dtype | None = None) -> Any:
    """A denoising network from a folder; safetensors only."""
    from diffusers import AutoModel, ModelMixin

    tensors(Path(source))
    with reading(source, "denoiser"):
        model = AutoModel.from_pretrained(str(source), torch_dtype=dtype, use_safetensors=True)
    if not isinstance(model, ModelMixin):
        raise ValueError(
            f"{source} holds a {type(model).__name__}, no denoiser; give a network or a pipeline "
            "of diffusers"
        )
    return model.eval()
