"""What a training takes: memory per device, disk and hours (`mmspec train --dry-run`).

Everything follows from configurations, on the meta device, and from the lengths of some prompts.
Letters: P parameters of the target, H of the head, L tokens of the longest row, D width, V' draft
vocabulary, K passes of the loss over its own states.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import nn

from mmspec.cli.training_examples import initial_head
from mmspec.cli.training_plan import TrainOptions
from mmspec.recipe import Recipe
from mmspec.training.conversations import Question
from mmspec.training.feature_size import cache_bytes, required_features
from mmspec.training.packing import check_packing, measure_padding
from mmspec.training.sharding import find_indivisible

GIB = 2**30
PROBED = 32  # questions that are tokenised to measure prompt lengths
MASTER, GRADIENT, ADAM, AVERAGE = 4, 4, 8, 4  # bytes per parameter of the head
COPIED = 8  # bytes per parameter: gradients of all processes in one tensor, and their mean
ANSWER_BYTES, TOKEN_BYTES = 70, 7  # a line of the file of answers, and one of its tokens
HOUR = 3600


@dataclass(frozen=True)
class CostModel:
    """Sizes of a training, from which all figures are computed."""

    options: TrainOptions
    recipe: Recipe
    reader: Any
    head: Any
    prompts: Sequence[int]  # measured lengths
    questions: int

    @cached_property
    def target_size(self) -> int:
        """P."""
        return sum(one.numel() for one in self.reader.model.parameters())

    @cached_property
    def head_size(self) -> int:
        """H, without frozen parameters."""
        return sum(one.numel() for one in self.head.parameters() if one.requires_grad)

    @property
    def item_bytes(self) -> int:
        """Bytes of one number of the target."""
        return torch.empty((), dtype=self.reader.model.dtype).element_size()

    @property
    def compute_bytes(self) -> int:
        """Bytes of one number of the head's computation."""
        return 2 if self.options.bf16 else self.item_bytes

    @property
    def width(self) -> int:
        """D."""
        return int(self.reader.config.hidden_size)

    @property
    def longest(self) -> int:
        """L."""
        most = max(self.prompts, default=0) + self.options.max_new_tokens
        return min(self.options.max_length, most)

    @property
    def mean_prompt(self) -> float:
        """Mean tokens of a prompt."""
        return sum(self.prompts) / max(len(self.prompts), 1)

    @property
    def passes(self) -> int:
        """K."""
        assert self.recipe.training is not None
        known = inspect.signature(self.recipe.training.loss).parameters
        return (
            min(int(known["passes"].default), self.options.max_new_tokens)
            if "passes" in known
            else 1
        )

    @property
    def sharding_problem(self) -> str | None:
        """Why the target cannot be sharded over the devices."""
        return find_indivisible(self.reader.config, self.options.devices or 1)

    @property
    def draft_vocabulary(self) -> int:
        """V'."""
        size = vars(self.head.config).get("draft_vocab_size")
        return int(size or self.reader.vocabulary)

    @cached_property
    def linear_layers(self) -> list[nn.Linear]:
        """The head's layers, without those of the vocabulary."""
        layers = [one for one in self.head.modules() if isinstance(one, nn.Linear)]
        return [one for one in layers if one.out_features != self.draft_vocabulary]

    @cached_property
    def num_outputs(self) -> int:
        """Distributions over the vocabulary per token: several for Medusa."""
        layers = [one for one in self.head.modules() if isinstance(one, nn.Linear)]
        return max(1, len(layers) - len(self.linear_layers))

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of keys and values of a token in all layers of the target."""
        config = self.reader.config
        heads = int(config.num_attention_heads)
        known = vars(config)
        size = int(known.get("head_dim") or self.width // heads)
        return (
            2
            * int(config.num_hidden_layers)
            * int(known.get("num_key_value_heads") or heads)
            * size
            * self.item_bytes
        )

    @cached_property
    def split_size(self) -> int:
        """Parameters of the target that a tensor parallel plan splits; encoders stay whole."""
        model = self.reader.model
        parts = (self.reader.decoder, model.get_input_embeddings(), model.get_output_embeddings())
        found = {id(one): one.numel() for part in parts if part for one in part.parameters()}
        return sum(found.values())

    def moved_bytes(self, tokens: float, devices: int) -> float:
        """Bytes over the link of each device for tokens that a sharded target reads.

        The outputs of attention and MLP of each layer are summed over all devices.
        """
        layers = int(self.reader.config.num_hidden_layers)
        return tokens * self.width * self.item_bytes * 2 * layers * 2 * (devices - 1) / devices


def estimate_cost(
    options: TrainOptions, recipe: Recipe, teacher: Any, questions: Sequence[Question]
) -> dict[str, Any]:
    """Parameters, memory in GiB, disk and hours; tokens of prompts are measured on some rows."""
    reader = teacher.reader
    counts = torch.ones(reader.vocabulary, dtype=torch.int64)
    with torch.device("meta"):
        head = initial_head(recipe, reader, counts, options.head, options.overrides, options.seed)
    if options.pack is not None:
        assert recipe.training is not None
        check_packing(recipe.training, head, options.pack)
    prompts, broken = _lengths(teacher, questions)
    model = CostModel(options, recipe, reader, head, prompts, len(questions))
    media = {one for question in questions for one in (*question.images, *question.videos)}
    return {
        "recipe": recipe.name,
        "head parameters": sum(one.numel() for one in head.parameters()),
        "target parameters": model.target_size,
        "questions": model.questions,
        "pictures": len(media),
        "tokens of a prompt, mean and most": [model.mean_prompt, max(prompts, default=0)],
        "measured on, unreadable": [len(prompts), broken],
        "tokens of answers, at most": model.questions * options.max_new_tokens,
        "passes over the data": options.steps
        * options.batch
        * options.accumulate
        / model.questions,
        "tokens per step, share of padding, about": estimate_padding(model),
        **estimate_memory(model),
        **estimate_disk(model),
        **estimate_hours(model),
    }


def estimate_padding(model: CostModel) -> list[float]:
    """Tokens per step without padding, and the share of padding, with answers of full length."""
    options, known = model.options, sorted(model.prompts) or [0]
    count = 8 * options.batch  # rows that batches of similar sizes are made of
    rows = [known[at * len(known) // count] for at in range(count)]
    sizes = [(one, min(options.max_new_tokens, max(options.max_length - one, 1))) for one in rows]
    batches = [sizes[at : at + options.batch] for at in range(0, count, options.batch)]
    tokens, share = measure_padding(batches, options.pack)
    return [tokens * options.accumulate, share]


def estimate_memory(model: CostModel) -> dict[str, Any]:
    """Memory in GiB of each device, with the target on each or sharded over all.

    The head has float32 weights, gradients and AdamW's two averages on every device. A batch holds
    the states that the target returns, and then whichever is more: the target's own computation, or
    the head's layers and distributions for the backward pass.
    """
    options, count = model.options, model.options.devices or 1
    size, target = model.head_size, model.target_size * model.item_bytes
    average = AVERAGE if options.ema else 0
    step = (COPIED if count > 1 else 0) + (2 if model.compute_bytes == 2 else 0)
    head = size * (MASTER + GRADIENT + ADAM + average + max(step, MASTER))  # a copy is measured
    batch, answers = (
        batch_bytes(model),
        4 * options.batch * model.longest * model.cache_bytes_per_token,
    )
    sharded = target - model.split_size * model.item_bytes * (1 - 1 / count)
    use = max(head + batch, answers)
    limit = model.options.assumed["device_gib"] * GIB
    problem = model.sharding_problem
    return {
        "memory of the target, GiB": target / GIB,
        "memory of the head, GiB": head / GIB,
        "memory of a batch, about, GiB": batch / GIB,
        "memory of the keys and values of answers, at most, GiB": answers / GIB,
        "devices": count,
        "memory per device, target on each, GiB": (target + use) / GIB,
        "memory per device, target sharded, GiB": problem or (sharded + use) / GIB,
        f"fit in {limit / GIB:g} GiB, on each and sharded": [
            target + use < limit,
            problem is None and sharded + use < limit,
        ],
    }


def batch_bytes(model: CostModel) -> int:
    """Bytes of the tensors of one batch of the longest rows, beside weights."""
    options, width, each = model.options, model.width, model.item_bytes
    rows, own = options.batch, model.compute_bytes
    answers, tokens = rows * options.max_new_tokens, rows * model.longest
    states = tokens * width * each * 5  # embeddings, three layers and the last one
    inner = int(vars(model.reader.config).get("intermediate_size") or 4 * width)
    target = tokens * (model.cache_bytes_per_token + (3 * inner + 4 * width) * each)
    length, sequences = model.longest, rows
    if options.pack is not None:
        each = max(options.pack // length, 1)
        length, sequences = length * each, -(-rows // each)
    read = sequences * length + answers * (model.passes - 1)
    layers = sum(one.in_features + one.out_features for one in model.linear_layers)
    vocabulary = model.draft_vocabulary * model.num_outputs
    logits = answers * (vocabulary * model.passes * 8 + model.reader.vocabulary * each)
    masks = sequences * length**2 * 4 + answers * length * 4 * model.passes
    learned = read * layers * own + logits + masks
    return int(states + max(target, learned))


def estimate_disk(model: CostModel) -> dict[str, Any]:
    """Files of --out and of --cache in GiB; a checkpoint is written beside the one before."""
    options, recipe, reader = model.options, model.recipe, model.reader
    assert recipe.training is not None
    checkpoint = model.head_size * (MASTER + ADAM + (AVERAGE if options.ema else 0))
    tokens = model.questions * options.max_new_tokens
    answers = model.questions * ANSWER_BYTES + tokens * TOKEN_BYTES
    found: dict[str, Any] = {
        "checkpoint, GiB": checkpoint / GIB,
        "answers, at most, GiB": answers / GIB,
    }
    total = 2 * checkpoint + answers + model.head_size * model.item_bytes
    if recipe.training.reads_states or options.cache is not None:
        tap = "hidden"
        if options.cache is not None:
            tap = required_features(recipe.training, reader, model.head)
        size = cache_bytes(reader, tap, [(model.mean_prompt * model.questions, tokens)])
        name = "states of the target, not stored, GiB"
        if options.cache is not None:
            name, total = "feature cache, at most about, GiB", total + size
        found[name] = size / GIB
    return {**found, "disk, at most about, GiB": total / GIB}


def estimate_hours(model: CostModel) -> dict[str, Any]:
    """Hours of each stage on all devices, with the target on each or sharded over all.

    A forward takes 2 P operations per token, the head's training 6 H per token and pass. A new
    token reads all weights from memory. The devices of a sharded target divide that and sum states
    over the link, and each of them trains the head on all batches.
    """
    options, given, count = model.options, model.options.assumed, model.options.devices or 1
    flops, memory = given["tflops"] * 1e12, given["memory_gbs"] * 1e9
    link = given["link_gbs"] * 1e9
    weights = model.target_size * model.item_bytes
    row = model.mean_prompt + options.max_new_tokens
    batches = model.questions / (4 * options.batch)
    read = max(weights / memory, 2 * model.target_size * 4 * options.batch / flops)
    prompts = 2 * model.target_size * model.mean_prompt * model.questions / flops
    answers = 0.0
    if options.answers == "target" and options.endpoint is None:
        answers = (prompts + batches * options.max_new_tokens * read) / count
    steps = options.steps * options.accumulate / count
    tokens = options.batch * row
    forwards = float(options.steps * options.accumulate)
    if options.cache is not None:
        forwards = min(forwards, model.questions / options.batch)
    target = forwards / count * 2 * model.target_size * tokens / flops
    learned = options.batch * (row + (model.passes - 1) * options.max_new_tokens)
    update = options.steps * model.head_size * 28 / memory
    if count > 1:
        update += options.steps * 2 * GRADIENT * model.head_size / link
    head = steps * 6 * model.head_size * learned / flops
    measured = options.steps // options.every + 1
    rounds = min(options.held_out, max(1, model.questions // 5)) / options.batch
    judged = measured * max(rounds, 1) * options.max_new_tokens * weights / memory
    on_each = [answers, target + head + update, judged]
    moved = model.moved_bytes(forwards * tokens, count) / link
    generated = model.moved_bytes(model.questions * row, count) / link if answers else 0.0
    sharded = [answers + generated, target + moved + count * head + update, judged / count]
    stages, possible = "answers, training, measuring", [on_each]
    found = {f"hours, target on each: {stages}": [one / HOUR for one in on_each]}
    if model.sharding_problem is None:
        found[f"hours, target sharded: {stages}"] = [one / HOUR for one in sharded]
        possible.append(sharded)
    return {
        **found,
        "hours in all, on each and sharded": [sum(one) / HOUR for one in possible],
        "assumed": ", ".join(f"{name}={value:g}" for name, value in given.items()),
    }


def _lengths(teacher: Any, questions: Sequence[Question]) -> tuple[list[int], int]:
    """Tokens of some prompts, evenly spread, and how many of these cannot be read."""
    found, broken = [], 0
    step = max(1, len(questions) // PROBED)
    for question in islice(questions, 0, None, step):
        try:
            media = teacher.load_media(question)
        except ValueError:
            broken += 1
            continue
        found.append(int(teacher.inputs([question], [media])["input_ids"].shape[1]))
    return found, broken
