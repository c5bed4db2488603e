"""Requests that are wrong in one or two ways: settings out of range, tensors that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tests.uses.judging import Misuse
from tests.uses.subjects import SUBJECTS, Subject

NAN, INF = float("nan"), float("inf")
ODD: tuple[Any, ...] = ("x", [], {}, -1, NAN, INF, object(), Path("nowhere"), b"x", {1, 2})
SEEDS: dict[str, tuple[Any, ...]] = {  # what we take ourselves, in every modality
    "seed": ("x", 1.5, [1], NAN, True, torch.rand(2)),
    "row_ids": ([1.5], "x", [1, 2, 3, 4, 5], [[1]], 7, [None]),
    "on_round": (5, "print", [print]),
}
GENERATION: dict[str, tuple[Any, ...]] = {
    "temperature": (-1.0, NAN, INF, "hot", [0.5], 1e300, -INF, {}),
    "top_k": (-3, 2.5, "many", [5], NAN),
    "top_p": (-0.1, 1.5, "x", NAN, [0.5]),
    "min_p": (2.0, -1.0, "x", NAN),
    "typical_p": (-1.0, 2.0, "x"),
    "epsilon_cutoff": (-1.0, 2.0, "x"),
    "eta_cutoff": (-1.0, 2.0, "x"),
    "max_new_tokens": (0, -5, 2.5, "ten", NAN, [3], None),
    "max_length": (-1, "x", 2.5, [9]),
    "min_new_tokens": (-1, "x", 2.5, 99),
    "num_beams": (0, 4, -1, "x", 2.5),
    "num_return_sequences": (0, 3, -1, "x"),
    "repetition_penalty": (0, -1.0, "x", NAN, [1]),
    "encoder_repetition_penalty": (0, -1.0, "x"),
    "no_repeat_ngram_size": (-1, "x", 2.5),
    "eos_token_id": ("x", -5, 1.5, [1.5], {}),
    "pad_token_id": ("x", -5, 1.5, [1, 2]),
    "bad_words_ids": ([], [1], [["x"]], 5, "x", [[-3]]),
    "suppress_tokens": ("x", 5, [1.5], ["x"]),
    "begin_suppress_tokens": ("x", 5, ["x"]),
    "forced_bos_token_id": ("x", 1.5),
    "forced_eos_token_id": ("x", 1.5),
    "sequence_bias": (5, "x", {5: 1.0}, [], {(3,): "x"}),
    "stop_strings": (5, ["."], ".", [5]),
    "stopping_criteria": (5, [5], "x"),
    "logits_processor": (5, [5], "x"),
    "streamer": (5, "x", print),
    "generation_config": ({"max_length": 3}, 5, "x"),
    "past_key_values": (5, "x", torch.zeros(2)),
    "prefix_allowed_tokens_fn": (5, "x"),
    "do_sample": ("yes", 2, [True]),
    "guidance_scale": (-1.0, "x", 2.0, NAN),
    "penalty_alpha": (0.6, "x"),
    "assistant_model": (5, "small"),
    "output_scores": ("yes",),
    "use_cache": ("no",),
    "cache_implementation": ("none", 5),
    "tokenizer": (5, "x"),
    "custom_generate": ("x", 5),
    "negative_prompt_ids": (5, torch.ones(1, 3)),
    "watermarking_config": (5, "x"),
    "exponential_decay_length_penalty": (5, (1, "x"), (1,)),
    "max_time": (-1.0, "x"),
    "synced_gpus": ("x",),
    "diversity_penalty": (1.0,),
    "prompt_lookup_num_tokens": (3, "x"),
}
PICTURES: dict[str, tuple[Any, ...]] = {
    "guidance": (-1.0, "x", NAN, INF, [2.0], {}),
    "grid": ("2x2", (2,), (0, 2), (-1, -1), (2.5, 2), ("a", "b"), 4, (10_000, 10_000), (2, 2, 2)),
    "temperature": (-1.0, NAN, "hot", [0.5], 1e300),
    "top_k": (-3, 2.5, "many"),
    "top_p": (-0.1, 1.5, "x", NAN),
    "negative": (5, [], {"input_ids": "x"}, {}, torch.ones(1, 3)),
    "prompt": (5, [], [5], b"x", {"a": 1}),
    "do_sample": ("yes", 2),
}
MAR: dict[str, tuple[Any, ...]] = {
    "class_labels": (99, -7, "cat", [1.5], [[1]], [], NAN, torch.rand(2)),
    "prompt": ("no such class", 5, [], [5]),
    "steps": (0, -2, 2.5, "x", 10_000, NAN),
    "head_steps": (0, 1, -2, 2.5, "x", 10**6, NAN),
    "guidance": (-1.0, "x", NAN, INF, [2]),
    "guidance_schedule": ("round", 5, "", []),
    "temperature": (-1.0, "x", NAN, INF),
    "last_noise": ("yes", 5, []),
    "vae": (5, "x", torch.nn.Linear(2, 2)),
}
CHAINS: dict[str, tuple[Any, ...]] = {
    "num_inference_steps": (0, 1, -3, 2.5, "x", NAN, 10**6, [3]),
    "guidance_scale": ("x", NAN, [2.0], {}),
    "guidance_rescale": ("x", NAN, [2.0]),
    "eta": (-1.0, 3.0, "x", NAN),
    "churn": (-1.0, 3.0, "x", NAN),
    "generator": (5, "x", [5], torch.zeros(2)),
    "latents": (5, "x", torch.zeros(1, 9, 9, 9), torch.full((1, 4, 8, 8), NAN)),
    "height": (-8, 7, "x", 2.5, 0),
    "width": (-8, 7, "x", 2.5, 0),
    "prompt": (5, [], [5], {}, None),
    "negative_prompt": (5, [5], ["a", "b", "c"], {}),
    "prompt_embeds": (5, torch.zeros(3), torch.zeros(1, 3, 5)),
    "class_labels": (["x"], [99999], "x", [1.5], [], [-1]),
    "batch_size": (0, -1, "x", 1.5),
    "num_images_per_prompt": (0, -1, "x", 1.5),
    "output_type": ("film", 5),
    "return_dict": ("no",),
    "callback_on_step_end": (5, "x"),
    "callback_on_step_end_tensor_inputs": (["nothing"], 5),
    "timesteps": ([5, 9, 700], "x", [], [1.5]),
    "sigmas": ("x", [], [NAN]),
    "cross_attention_kwargs": (5, {"x": 1}),
    "clip_skip": ("x", 99, -1),
    "ip_adapter_image": (5, "x"),
    "image": (5, Image.new("RGB", (8, 8))),
}
UNKNOWN = (
    *("temprature", "max_tokens", "images", "image", "text", "prompts", "guidence", "step"),
    *("n", "stop", "seeds", "top-k", "pixel_value", "modality", "recipe", "drafter", "tree", ""),
)


def misuse(rng: Random, only: tuple[str, ...] | None = None) -> Misuse:
    """A request of some model, harmed once or twice."""
    subject = SUBJECTS[rng.choice(only or tuple(SUBJECTS))]
    given, harms = dict(subject.request()), rng.choice((1, 1, 1, 2))
    wrong: list[str] = []
    descriptions: list[str] = []
    for _ in range(harms):
        words, description = rng.choice((_setting, _setting, _tensor, _unknown, _ours))(
            rng, subject, given
        )
        wrong += words
        descriptions.append(description)
    text = f"{subject.name}.{subject.call}: {'; '.join(descriptions)}"
    is_shared = subject.stock and not set(given) & {"seed", "row_ids", "on_round", "eta", "churn"}
    stock = partial(subject.run_library, given) if is_shared else None
    return Misuse(text, tuple(wrong), partial(subject.run, given), stock)


Harm = tuple[list[str], str]


def _setting(rng: Random, subject: Subject, given: dict[str, Any]) -> Harm:
    """A setting that a model of this kind has, with a value out of its range or of another kind."""
    tables = {"latents": CHAINS, "patches": MAR}
    table = tables.get(subject.decodes, PICTURES if not subject.stock else GENERATION)
    if rng.random() < 0.1:  # of another modality
        table = rng.choice([one for one in (GENERATION, PICTURES, MAR, CHAINS) if one is not table])
    name = rng.choice([*table])
    value = rng.choice((*table[name], *table[name], rng.choice(ODD)))
    given[name] = value
    return [name, *_parts(value)], f"{name}={value!r}"


def _ours(rng: Random, subject: Subject, given: dict[str, Any]) -> Harm:
    name = rng.choice([*SEEDS])
    value = rng.choice(SEEDS[name])
    given[name] = value
    return [name, *_parts(value)], f"{name}={value!r}"


def _unknown(rng: Random, subject: Subject, given: dict[str, Any]) -> Harm:
    name = rng.choice(UNKNOWN)
    given[name] = rng.choice((1, "x", None, [1]))
    return [name or "''"], f"{name}={given[name]!r}"


def _parts(value: Any) -> list[str]:
    """How an error may write a value."""
    return [str(value)] if isinstance(value, str | int | float) and str(value) else []


def _tensor(rng: Random, subject: Subject, given: dict[str, Any]) -> Harm:
    """One input harmed; a setting where the model takes no tensors."""
    there = [name for name, value in given.items() if isinstance(value, Tensor)]
    names = [name for name in there if not given[name].is_meta]  # harmed already
    if not names:
        return _setting(rng, subject, given)
    name = rng.choice(names)
    # of classes, one per picture
    right = ("without its batch", "with two rows", "longer", "a list", "of numpy", "a number")
    given_alone = name.endswith("mask") and not subject.stock  # prompts here are not padded
    free = right if name == "class_ids" else ("gone",) if given_alone else ()
    how = rng.choice([one for one in HARMS if one not in free])
    found = HARMS[how](given[name], rng)
    if found is None:
        given.pop(name)
    else:
        given[name] = found
    related = [name, "input_ids", "attention_mask", "prompt", "picture", "image", "class_ids"]
    return related, f"{name} {how}"


def _larger(x: Tensor, rng: Random) -> Any:
    """Numbers that no vocabulary has; of floats, noughts and no numbers."""
    if x.is_floating_point():
        return x * NAN
    x = x.clone()
    x.view(-1)[rng.randrange(x.numel())] = rng.choice((10**7, 10**12, -1, -100))
    return x


HARMS: Mapping[str, Callable[[Tensor, Random], Any]] = {
    "gone": lambda x, rng: None,
    "of another dtype": lambda x, rng: x.long() if x.is_floating_point() else x.float() + 0.5,
    "without its batch": lambda x, rng: x[0],
    "with one axis more": lambda x, rng: x[None],
    "with two rows": lambda x, rng: torch.cat((x, x)),
    "without rows": lambda x, rng: x[:0],
    "cut": lambda x, rng: x[..., : x.shape[-1] // 2],
    "empty": lambda x, rng: x[..., :0],
    "longer": lambda x, rng: torch.cat((x, x), -1),
    "out of range": _larger,
    "a list": lambda x, rng: x.tolist(),
    "of numpy": lambda x, rng: np.asarray(x),
    "a text": lambda x, rng: "a red square",
    "a number": lambda x, rng: 5,
    "a picture": lambda x, rng: Image.new("RGB", (8, 8)),
    "complex": lambda x, rng: x.to(torch.complex64),
    "on another device": lambda x, rng: x.to("meta"),
    "its own negative": lambda x, rng: -x - 1,
}


def misuses(seed: int) -> Iterator[Misuse]:
    rng = Random(seed)
    while True:
        yield misuse(rng)
