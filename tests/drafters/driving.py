"""A tiny language model and a decoding loop for the tests of this folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from mmspec.decode import Parts, decode
from mmspec.distributions.noise import KeyedNoise
from mmspec.distributions.sampling import Sampling
from mmspec.draft import Drafter, Round
from mmspec.targets.readers.backbone import Backbone
from mmspec.targets.stop import Stop
from mmspec.targets.tokens.causal import CausalTarget
from mmspec.targets.tokens.context import Context, Request
from mmspec.verifiers.coupled import Coupled
from tests.toys import readers as families

VOCABULARY = 48
CPU = torch.device("cpu")


def tiny(seed: int = 0) -> Any:
    """A random Llama; its wide weights make clear decisions, and its greedy text loops."""
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
    )
    model: Any = LlamaForCausalLM(config)
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.18, generator=generator)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.requires_grad_(False)


def inputs(padding: tuple[int, ...] = (0,), length: int = 12) -> dict[str, Tensor]:
    """Random prompts, one row per entry of `padding`."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (len(padding), length), generator=generator)
    mask = torch.ones_like(ids)
    for row, pad in enumerate(padding):
        ids[row, :pad] = mask[row, :pad] = 0
    return {"input_ids": ids, "attention_mask": mask}


def greedy(model: Any, prompt: Mapping[str, Tensor], room: int) -> list[list[int]]:
    """What transformers generates without a drafter."""
    out: Tensor = model.generate(**prompt, max_new_tokens=room, do_sample=False)
    answers: list[list[int]] = out[:, prompt["input_ids"].shape[1] :].tolist()
    return answers


def drive(
    model: Any, drafter: Drafter, prompt: Mapping[str, Tensor], room: int, **sampling: Any
) -> tuple[list[list[int]], list[Round]]:
    """Decode with a drafter; a drafter that fails, fails the test."""
    batch = prompt["input_ids"].shape[0]
    request = Request(prompt, Sampling(**sampling), KeyedNoise.from_seed(0, batch, CPU), room)
    target = CausalTarget(Backbone(model, families.find_family(model)))
    rounds = list(decode(Parts(target, drafter, Coupled(), Stop(room)), request))
    assert not [turn.fallback for turn in rounds if turn.fallback]
    text = [[token for turn in rounds for token in turn.tokens[row]] for row in range(batch)]
    return text, rounds


def count_accepted(rounds: list[Round]) -> int:
    """Accepted draft tokens, over all rows."""
    return sum(sum(turn.accepted) for turn in rounds)


def context(*texts: list[int], room: int = 100, vocabulary: int = VOCABULARY) -> Context:
    """Prompts that have just been read, without a model."""
    noise = KeyedNoise.from_seed(0, len(texts), CPU)
    return Context(
        request=Request({}, Sampling(), noise, room),
        history=tuple(list(text) for text in texts),
        prompt=tuple(len(text) for text in texts),
        padding=(0,) * len(texts),
        vocabulary=vocabulary,
        memory=None,  # type: ignore[arg-type]  # drafters without a model never touch it
        noise=noise,
        finished=(False,) * len(texts),
    )
