"""Every pipeline of diffusers that makes pictures or clips from text, built from small components.

A component is built from the class that the pipeline's constructor names; `PIPELINES` has what a
pipeline needs in addition, and `build_request` the arguments of a call for its latents.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch

from mmspec.modalities.diffusion import tiny_text
from mmspec.modalities.diffusion.tiny_networks import is_network, network, randomize_all

PROMPT = "a red square"
SIDE, FRAMES = 64, 9
# of a pipeline that starts from something other than text
OTHER_INPUTS = (
    *("Img2Img", "Inpaint", "ControlNet", "Control", "ImageToVideo", "VideoToVideo", "Edit"),
    *("Upscale", "Depth2Img", "InstructPix2Pix", "Adapter", "Audio", "Modular", "Prior", "Refine"),
    *("I2I", "I2V", "Image2Video", "SuperResolution", "Animate2", "WanAnimate", "Onnx", "HDR"),
    *("ImageVariation", "Fill", "Framepack", "InContext", "Layered", "Joy", "Decoder"),
)
OTHER_OUTPUTS = ("AceStep", "LLaDA2", "DiffusionGemma", "ShapE")  # sound, text, meshes


@dataclass(frozen=True)
class Needs:
    """What a pipeline needs beside the classes of its constructor."""

    parts: dict[str, dict[str, Any]] = field(default_factory=dict)  # changes of networks, by part
    given: dict[str, Any] = field(default_factory=dict)  # components and settings as they are
    kinds: dict[str, str] = field(default_factory=dict)  # classes of parts
    call: dict[str, Any] = field(default_factory=dict)  # arguments of a call
    scheduler: dict[str, Any] = field(default_factory=dict)  # settings of the scheduler
    layers: int = tiny_text.LAYERS  # of language models, of which some pipelines read many


def text_pipelines() -> list[str]:
    """The names of pipelines that take a prompt and need no picture, by their signatures."""
    found = []
    for name in dir(diffusers):
        if not name.endswith("Pipeline") or any(one in name for one in OTHER_INPUTS):
            continue
        made = getattr(diffusers, name)
        if not callable(made) or not hasattr(made, "_get_signature_types"):
            continue  # dummies of missing libraries
        call = inspect.signature(made.__call__).parameters
        needed = {
            k for k, p in call.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD
        }
        is_other = name.startswith(OTHER_OUTPUTS) or "deprecated" in made.__module__
        if "prompt" in call and needed <= {"self", "prompt"} and not is_other:
            found.append(name)
    return found


def build(name: str, seed: int = 0) -> Any:
    """A small float32 pipeline with random weights and the scheduler it ships with."""
    made: Any = getattr(diffusers, name)
    needs = PIPELINES.get(name, Needs())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        parts = {
            part: _component(part, kinds, needs)
            for part, kinds in made._get_signature_types().items()
            if part not in needs.given and _is_component(part, kinds)
        }
        signature = inspect.signature(made.__init__).parameters
        absent = {
            part: None
            for part, one in signature.items()
            if part not in {"self", *parts, *needs.given} and one.default is one.empty
        }
        pipe = made(**parts, **absent, **needs.given)
    randomize_all(pipe.components, seed)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def build_request(pipe: Any) -> dict[str, Any]:
    """Arguments of a call for the latents of one small picture or clip."""
    known = inspect.signature(pipe.__call__).parameters
    usual = {
        "prompt": PROMPT,
        "height": SIDE,
        "width": SIDE,
        "num_frames": FRAMES,
        "max_sequence_length": 64,
        "output_type": "latent",
        "use_resolution_binning": False,
        "clean_caption": False,
    }
    needs = PIPELINES.get(type(pipe).__name__, Needs())
    given = {**{name: one for name, one in usual.items() if name in known}, **needs.call}
    return given


def _is_component(part: str, kinds: Any) -> bool:
    """Whether a parameter of a constructor is a component that a call from text needs."""
    skipped = (
        *("image_encoder", "feature_extractor", "safety_checker", "watermarker", "siglip"),
        *("prompt_enhancer", "pe", "duration_head", "audio_scheduler", "sound_tokenizer"),
    )
    return not part.startswith(skipped) and bool(_classes(kinds))


def _classes(kinds: Any) -> list[Any]:
    return [one for one in kinds if inspect.isclass(one) and one.__module__ != "builtins"]


def _component(part: str, kinds: Any, needs: Needs) -> Any:
    """A small component of the first class that its pipeline names."""
    kind = needs.kinds.get(part, _classes(kinds)[0].__name__)
    if kind.endswith(("Scheduler", "SchedulerMixin", "Schedulers")):
        return scheduler(kind, **needs.scheduler)
    if is_network(kind):
        return network(kind, **needs.parts.get(part, {}))
    return tiny_text.make(kind, needs.layers)


def scheduler(kind: str, **settings: Any) -> Any:
    if kind in ("KarrasDiffusionSchedulers", "SchedulerMixin"):
        kind = "DPMSolverMultistepScheduler"
    return getattr(diffusers, kind)(**settings)


class _NoCheck:
    """A safety checker of Cosmos that passes everything: its own needs another library."""

    def to(self, *args: Any) -> _NoCheck:
        return self

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, frames: Any) -> Any:
        return frames


XL: dict[str, Any] = {
    "cross_attention_dim": 2 * tiny_text.WIDTH,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 6 * 8 + tiny_text.WIDTH,
    "use_linear_projection": True,
}
SD3: dict[str, Any] = {"transformer": {"sample_size": 8, "pooled_projection_dim": 64}}
COSMOS = Needs(given={"safety_checker": _NoCheck()})
PLAIN_SD = Needs(given={"requires_safety_checker": False})
PIPELINES: dict[str, Needs] = {
    **dict.fromkeys(
        (
            "Cosmos2TextToImagePipeline",
            "Cosmos2VideoToWorldPipeline",
            "CosmosTextToWorldPipeline",
            "CosmosVideoToWorldPipeline",
        ),
        COSMOS,
    ),
    "Cosmos2_5_PredictBasePipeline": Needs(
        given={"safety_checker": _NoCheck()},
        parts={
            "transformer": {"use_crossattn_projection": True, "crossattn_proj_in_channels": 128}
        },
    ),
    "Cosmos3OmniPipeline": Needs(
        given={"safety_checker": _NoCheck()},
        parts={"transformer": {"latent_channel": 16, "patch_latent_dim": 64}},
    ),
    "BriaFiboPipeline": Needs(parts={"transformer": {"joint_attention_dim": 64}}),
    "BriaFibo2Pipeline": Needs(
        parts={
            "transformer": {
                "cap_feat_dim": 96,
                "n_layers": 6,
                "injection_layer_ids": (1, 2, 3, 4, 5),
            }
        },
        layers=36,
    ),
    "PRXPipeline": Needs(
        kinds={"tokenizer": "GemmaTokenizer"}, parts={"vae": {"latent_channels": 16}}
    ),
    "NucleusMoEImagePipeline": Needs(layers=10),
    **dict.fromkeys(
        ("KolorsPipeline", "KolorsPAGPipeline"),
        Needs(
            parts={
                "unet": {
                    "addition_embed_type": "text_time",
                    "addition_time_embed_dim": 8,
                    "projection_class_embeddings_input_dim": 6 * 8 + tiny_text.WIDTH,
                    "encoder_hid_dim": tiny_text.WIDTH,
                    "encoder_hid_dim_type": "text_proj",
                }
            }
        ),
    ),
    **dict.fromkeys(
        ("LTX2Pipeline", "LTX2ConditionPipeline", "LTX2DFRPipeline"),
        Needs(given={"processor": None}),
    ),
    "StableUnCLIPPipeline": Needs(
        parts={
            "prior": {"embedding_dim": 32},
            "image_normalizer": {"embedding_dim": 32},
            "unet": {
                "class_embed_type": "projection",
                "projection_class_embeddings_input_dim": 64,
            },
        },
        call={"prior_num_inference_steps": 2},
    ),
    "AnimateDiffSDXLPipeline": Needs(parts={"unet": XL}),
    "StableDiffusionXLPipeline": Needs(parts={"unet": XL}, given={"add_watermarker": False}),
    "StableDiffusionXLPAGPipeline": Needs(parts={"unet": XL}, given={"add_watermarker": False}),
    "StableDiffusionPipeline": PLAIN_SD,
    "StableDiffusionPAGPipeline": PLAIN_SD,
    "LatentConsistencyModelPipeline": Needs(
        parts={"unet": {"time_cond_proj_dim": 8}}, given={"requires_safety_checker": False}
    ),
    "IFPipeline": Needs(
        parts={"unet": {"in_channels": 3, "out_channels": 6, "sample_size": 16}},
        scheduler={"variance_type": "learned_range"},
        call={"output_type": "pt", "height": 16, "width": 16},
        given={"requires_safety_checker": False},
    ),
    "StableDiffusion3Pipeline": Needs(parts=SD3),
    "StableDiffusion3PAGPipeline": Needs(parts=SD3),
    "AllegroPipeline": Needs(
        parts={"transformer": {"attention_head_dim": 24, "cross_attention_dim": 48}}
    ),
    "Flux2Pipeline": Needs(call={"text_encoder_out_layers": (1, 2, 3)}),
    "Flux2KleinPipeline": Needs(call={"text_encoder_out_layers": (1, 2, 3)}),
    "Flux2KleinKVPipeline": Needs(call={"text_encoder_out_layers": (1, 2, 3)}),
    "FluxKontextPipeline": Needs(call={"max_area": 64 * 64, "_auto_resize": False}),
    "EasyAnimatePipeline": Needs(call={"negative_prompt": ""}),
    "HiDreamImagePipeline": Needs(
        parts={"transformer": {"llama_layers": [0, 1, 2, 3]}},
        kinds={"text_encoder_4": "LlamaForCausalLM"},
    ),
    "Kandinsky5T2IPipeline": Needs(call={"height": 1024, "width": 1024}),
    "Krea2Pipeline": Needs(
        given={"text_encoder_select_layers": (1, 2)},
        parts={"transformer": {"num_text_layers": 2}},
    ),
    "Lumina2Pipeline": Needs(kinds={"text_encoder": "Gemma2Model"}),
    "LuminaPipeline": Needs(kinds={"text_encoder": "GemmaModel"}),
    **dict.fromkeys(
        ("SanaPipeline", "SanaPAGPipeline"), Needs(kinds={"text_encoder": "Gemma2Model"})
    ),
    "SanaSprintPipeline": Needs(
        kinds={"text_encoder": "Gemma2Model", "scheduler": "SCMScheduler"},
        parts={"transformer": {"guidance_embeds": True}},
        call={"intermediate_timesteps": None, "num_inference_steps": 2},
    ),
    "SanaVideoPipeline": Needs(
        kinds={"text_encoder": "Gemma2Model", "vae": "AutoencoderKLWan"}, call={"frames": 9}
    ),
    "ZImagePipeline": Needs(kinds={"text_encoder": "Qwen3Model"}),
    "ZImageOmniPipeline": Needs(kinds={"text_encoder": "Qwen3Model"}),
    "Ideogram4Pipeline": Needs(
        kinds={"text_encoder": "Qwen3VLModel"},
        parts={
            part: {"llm_features_dim": 13 * tiny_text.WIDTH}
            for part in ("transformer", "unconditional_transformer")
        },
        call={"guidance_scale": 4.0, "guidance_schedule": None},
        layers=36,
    ),
    "PRXPixelPipeline": Needs(kinds={"text_encoder": "Qwen3VLModel"}),
    "GlmImagePipeline": Needs(
        given={"processor": None, "vision_language_encoder": None},
        call={"prior_token_ids": torch.arange(16)[None]},
    ),
}
