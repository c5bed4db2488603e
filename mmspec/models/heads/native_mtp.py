"""Draft heads that a target's own checkpoint contains (multi-token prediction, MTP).

DeepSeek-AI 2024 (DeepSeek-V3, section 2.2); Qwen3-Next, Qwen3.5, GLM-4.5 and others. transformers
leaves these weights out when it loads the model. A head is one decoder layer of the target's class:

    slot t    fc([norm(embedding t + 1) ; norm(state t)]) -> layer -> norm -> state t + 1

States are the target's last hidden states, after the final norm; embedding table, output head and
rotary positions are the target's. Of several layers in a checkpoint the first is used for every
step. Weights of experts are converted as transformers converts those of the target.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.utils import logging as hf_logging

from mmspec.models.folder import find_weight_files
from mmspec.models.heads.state_head import SlotMarks, StateHead
from mmspec.models.llama_layers import FULL, Layers
from mmspec.models.own_heads import LAYER, find_folder

MARK = "native_mtp"  # in the configuration of a saved head


class NativeMtpHead(StateHead):
    """Maps next tokens and the target's states before them to the states of these tokens.

    `config` is `head_config` of the target's; `decoder` is of the target's class and has this
    configuration: its layer and rotary embedding are used. Raises ValueError for a decoder without.
    """

    def __init__(self, config: Any, decoder: Any) -> None:
        missing = [name for name in ("layers", "norm", "rotary_emb") if not hasattr(decoder, name)]
        if missing:
            raise ValueError(
                f"a {type(decoder).__name__} has no {' or '.join(missing)}, which a native MTP "
                "head takes from its target; choose another recipe"
            )
        super().__init__(config)
        width = config.hidden_size
        norm = type(decoder.norm)
        self.enorm, self.hnorm, self.norm = (norm(width, eps=config.rms_norm_eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.layers, self.rotary_emb = decoder.layers, decoder.rotary_emb

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True

    def prepare_inputs(
        self, embeds: Tensor, states: Tensor, marks: SlotMarks
    ) -> tuple[Layers, Tensor]:
        inputs: Tensor = self.eh_proj(torch.cat((self.enorm(embeds), self.hnorm(states)), -1))
        return self.layers, inputs

    def finish_states(self, states: Tensor) -> Tensor:
        normed: Tensor = self.norm(states)
        return normed


def head_config(text: Any) -> Any:
    """Configuration of the head of a target: that of its text model with one full layer."""
    config = copy.deepcopy(text)
    changes = {
        **{"num_hidden_layers": 1, "layer_types": [FULL], "mlp_layer_types": ["sparse"]},
        **{"first_k_dense_replace": 0, "mlp_only_layers": []},
    }
    for name, value in changes.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    rope = getattr(config, "rope_parameters", None) or {}
    own = {"tapped_layers": None, "visual_slots": "fused", "num_steps": 0, "visual_keep": 1.0}
    own |= {"positions": "mrope" if rope.get("mrope_section") else "keep", MARK: True}
    for name, value in {**own, "sliding_window": None}.items():
        setattr(config, name, value)
    return config


def new_head(decoder: Any, text: Any) -> NativeMtpHead:
    """Make a head with random weights for a target with this decoder and text configuration."""
    config = head_config(text)
    return NativeMtpHead(config, type(decoder)(_small(config)))


def load_head(target: Any, names: Mapping[str, str]) -> NativeMtpHead:
    """Load the head of a target from its checkpoint; `names` are those of `find_weights`.

    Only its tensors are read. Raises ValueError for missing or unknown weights, and for wrong
    shapes.
    """
    folder = find_folder(target)
    assert folder is not None
    tensors: dict[str, Tensor] = {}
    for file in find_weight_files(folder):
        with safe_open(file, framework="pt") as opened:
            for name in names.keys() & set(opened.keys()):
                tensors[names[name]] = opened.get_tensor(name)
    return build_head(target, tensors, folder)


def build_head(target: Any, tensors: Mapping[str, Tensor], source: Path) -> NativeMtpHead:
    """Build a head from its weights. Raises ValueError as `load_head`."""
    config = head_config(target.config.get_text_config(decoder=True))
    kind = type(target.get_decoder())
    inner = {name: one for name, one in tensors.items() if name.startswith(LAYER)}
    verbosity = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()  # the tables of this decoder are random, and not used
    try:
        decoder, found = kind.from_pretrained(
            None,
            config=_small(config),
            state_dict=inner,
            output_loading_info=True,
            dtype=target.dtype,
        )
    except RuntimeError as error:
        raise ValueError(f"the draft head in {source} has wrong shapes ({error})") from error
    finally:
        hf_logging.set_verbosity(verbosity)
    head = NativeMtpHead(config, decoder)
    nn.Module.to(head, target.dtype)
    outer = {name: one for name, one in tensors.items() if name not in inner}
    missing = [name for name in found["missing_keys"] if name.startswith(LAYER)]
    needed = {name for name in head.state_dict() if not name.startswith("layers.")}
    missing += sorted(needed - outer.keys())
    if missing or found["unexpected_keys"]:
        some = ", ".join(sorted({*missing, *found["unexpected_keys"]})[:3])
        raise ValueError(
            f"the draft head in {source} lacks or has unknown weights ({some}); copy the "
            "checkpoint again, or give recipe= another one"
        )
    for name, one in outer.items():
        own = head.get_parameter(name)
        if own.shape != one.shape:
            raise ValueError(
                f"{name} of the draft head in {source} is {tuple(one.shape)}, not "
                f"{tuple(own.shape)}; copy the checkpoint again"
            )
        own.data.copy_(one)
    head.train(False)
    return head


def _small(config: Any) -> Any:
    """The same with a vocabulary of one token, as tables are the target's."""
    found = copy.deepcopy(config)
    found.vocab_size, found.pad_token_id = 1, None
    return found
