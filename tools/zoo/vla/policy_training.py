"""Train a policy: its vision towers on scene and pose, then all of it by behaviour cloning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import einops
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from mmspec.codes.actions import ActionCodes, ActionSpace
from mmspec.training.fitting import CosineDecay, TrainingRun, fit, shuffle_batches, split_parameters
from mmspec.zoo.scene_tensors import BOARD_CLASSES, board_loss, encode_board
from tools.zoo.vla.architecture import PATCH, PIXELS, PROMPT, WIDTH
from tools.zoo.vla.frames import TableFrames

_POSE = np.array([0.3, 0.3, 0.25, 1.0, 1.0, 1.0, 1.0])  # scale of poses
_WIDTH = 4.0  # bins: standard deviation of target distributions around the expert's value
_OFF = 5.0  # bins: standard deviation of the noise of input actions
_FORESIGHT = 0.3  # weight of the foresight loss
_UNIT = 10.0  # bins: unit of the foresight loss


@dataclass(frozen=True)
class ActionBatch:
    """Packed rows: a picture and several instructions with actions, independent of one another.

    pictures: (B, 6, P, P), or features of the towers (B, N, W); ids, positions, groups: (B, L),
    group 0 is the shared prefix (picture and first words), -1 padding; answers: (M, 7) indices in
    the flat (B * L) that predict each token; actions: (M, 7) normalised; aims: (M, 9) goal, pose.
    """

    pictures: Tensor
    ids: Tensor
    positions: Tensor
    groups: Tensor
    answers: Tensor
    actions: Tensor
    aims: Tensor


class ActionExamples:
    """Makes batches of frames; optional `features` (N, P, W) are those of frozen towers."""

    def __init__(
        self,
        frames: TableFrames,
        model: Any,
        tokenizer: Any,
        space: ActionSpace,
        features: Tensor | None = None,
    ) -> None:
        self.frames, self.space, self.tokenizer = frames, space, tokenizer
        self.features = features
        known = sorted({one for row in frames.instructions for one in row})
        prompts = [tokenizer(PROMPT.format(one)).input_ids for one in known]
        same = next(at for at, ids in enumerate(zip(*prompts, strict=False)) if len(set(ids)) > 1)
        picture = [model.config.image_token_id] * model.vision_backbone.patches
        self.opening = [*prompts[0][:1], *picture, *prompts[0][1:same]]
        self.prompts = {one: ids[same:] for one, ids in zip(known, prompts, strict=True)}

    def batches(self, batch: int, seed: int) -> Iterator[ActionBatch]:
        """Endless batches."""
        generator = np.random.default_rng((seed, 14))
        whole = len(self.frames) - len(self.frames) % batch
        for picked in shuffle_batches(whole, batch, generator):
            yield self.batch(picked, generator)

    def batch(self, picked: np.ndarray, generator: np.random.Generator) -> ActionBatch:
        """A batch of these frames; the input actions have noise."""
        frames = self.frames
        goals = [frames.goals[i] for i in picked]
        counts = [len(one) for one in goals]
        raw = torch.from_numpy(np.concatenate([frames.actions[i] for i in picked]))
        actions = self.space.normalise(raw)
        noisy = self.tokens(perturb(actions, generator))
        poses = np.repeat(frames.poses[picked] / _POSE, counts, axis=0)
        aims = np.concatenate((np.concatenate(goals) / _POSE[:2], poses), 1)
        rows, inputs = [], iter(noisy.tolist())
        for i, count in zip(picked, counts, strict=True):
            rows.append([(frames.instructions[i][k], next(inputs)) for k in range(count)])
        ids, positions, groups, answers = self._pack_rows(rows)
        features = self.features
        if features is None:
            pictures = pixel_values(frames.images[picked])
        else:
            pictures = features[picked].float()
        return ActionBatch(
            pictures,
            *(ids, positions, groups, answers),
            actions,
            torch.from_numpy(aims).float(),
        )

    def tokens(self, actions: Tensor) -> Tensor:  # (..., 7) normalised -> (..., 7)
        """Ids of actions; a scaled component of 1 gets the last bin."""
        below = torch.cat((actions[..., :6].clamp_max(1 - 1e-6), actions[..., 6:]), -1)
        return self.space.encode(below)

    def _pack_rows(
        self, rows: list[list[tuple[str, list[int]]]]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """ids, positions, groups (B, L), and the indices that predict action tokens (M, 7)."""
        ids, positions, groups, ends = [], [], [], []
        start = len(self.opening)
        for row in rows:
            line, position, group, end = [*self.opening], [*range(start)], [0] * start, []
            for number, (instruction, action) in enumerate(row, 1):
                suffix = [*self.prompts[instruction], *action[:-1]]
                line += suffix
                position += range(start, start + len(suffix))
                group += [number] * len(suffix)
                end.append(len(line) - len(action))
            ids.append(torch.tensor(line))
            positions.append(torch.tensor(position))
            groups.append(torch.tensor(group))
            ends.append(end)
        width = max(map(len, ids))
        first = torch.tensor([b * width + at for b, end in enumerate(ends) for at in end])
        padded = (
            pad_sequence(ids, True, self.tokenizer.pad_token_id),
            pad_sequence(positions, True, 0),
            pad_sequence(groups, True, -1),
        )
        return *padded, first[:, None] + torch.arange(7)


def perturb(actions: Tensor, generator: np.random.Generator) -> Tensor:  # (M, 7)
    """Add noise of some bins, as of a policy's own predictions."""
    off = torch.from_numpy(generator.normal(0, _OFF * 2 / 255, tuple(actions.shape)))
    off[:, 6] = 0
    return (actions + off).clamp(-1, 1)


def pixel_values(images: np.ndarray) -> Tensor:  # (B, P, P, 3) bytes -> (B, 6, P, P)
    """Pixel values in [-1, 1] for both towers, as of the processor."""
    values = torch.from_numpy(images).permute(0, 3, 1, 2).float().div(127.5).sub(1)
    return values.repeat(1, 2, 1, 1)


def train_towers(
    model: Any, frames: TableFrames, batch: int, schedule: CosineDecay, run: TrainingRun
) -> None:
    """Train the towers to predict the content of the nine cells, and the pose of the hand."""
    towers = model.vision_backbone
    side = PIXELS // PATCH
    things = nn.Linear(towers.width, sum(BOARD_CLASSES))
    hand = nn.Linear(towers.width * side * side, 7)
    boards = torch.stack([encode_board(scene) for scene in frames.scenes])
    poses = torch.from_numpy(frames.poses / _POSE).float()

    def loss_of(picked: np.ndarray) -> Tensor:
        seen = towers(pixel_values(frames.images[picked]))
        cells = einops.reduce(seen, "b (r m c n) d -> b (r c) d", "mean", r=3, m=2, c=3, n=2)
        off = functional.mse_loss(hand(seen.flatten(1)), poses[picked])
        return board_loss(things(cells), boards[picked]) + 30 * off

    items = shuffle_batches(len(frames) // batch * batch, batch, np.random.default_rng(run.seed))
    parameters = trained_parameters(towers)
    matrices = [p for p in split_parameters(towers, [])[0] if is_in(p, parameters)]
    others = [p for p in parameters if not is_in(p, matrices)]
    others += [*things.parameters(), *hand.parameters()]
    fit(others, items, loss_of, schedule, "see", run, matrices=matrices)


@torch.no_grad()
def encode_images(model: Any, frames: TableFrames) -> Tensor:
    """Tower features (N, P, W) float16 of all pictures."""
    parts = np.array_split(np.arange(len(frames)), -(-len(frames) // 64))
    towers = model.vision_backbone
    return torch.cat([towers(pixel_values(frames.images[part])).half() for part in parts])


def is_in(parameter: nn.Parameter, some: Iterable[nn.Parameter]) -> bool:
    """Whether a parameter is in a collection, by identity."""
    return any(parameter is one for one in some)


def trained_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Parameters without the last blocks of towers, which features do not depend on."""
    return [
        p
        for name, p in module.named_parameters()
        if ".blocks.2." not in name and "featurizer.norm." not in name
    ]


def train_policy(
    model: Any,
    teacher: ActionExamples,
    batch: int,
    schedule: CosineDecay,
    run: TrainingRun,
    aim: float = 5.0,
) -> None:
    """Train a policy on the expert's actions; `aim` weighs locating goal and hand at mid depth.

    Each state also predicts the rest of the action (see `foresight_loss`), so that a small head can
    draft it. Towers stay frozen if the examples have their features.
    """
    compass, ahead = nn.Linear(WIDTH, 9), nn.Linear(WIDTH, 7)
    for linear in (compass, ahead):  # no effect at the start
        nn.init.zeros_(linear.weight)

    def loss_of(item: ActionBatch) -> Tensor:
        hidden, midway = read_states(model, item)
        logits = model.language_model.lm_head(hidden)
        found = action_loss(logits, item.actions, teacher.space)
        off = functional.mse_loss(compass(midway), item.aims)
        guesses = ahead(hidden)
        later = foresight_loss(guesses, logits, item.actions, teacher.space.codes)
        return found.mean() + aim * off + _FORESIGHT * later

    parts = [model.projector, model.language_model]
    layers = [model.language_model.model.layers]
    if teacher.features is None:
        parts, layers = [model], [*layers, model.vision_backbone]
    parameters = trained_parameters(nn.ModuleList(parts))
    matrices = [p for p in split_parameters(nn.ModuleList(layers), [])[0] if is_in(p, parameters)]
    heads = [*compass.parameters(), *ahead.parameters()]
    others = [p for p in [*parameters, *heads] if not is_in(p, matrices)]
    fit(others, teacher.batches(batch, run.seed), loss_of, schedule, "act", run, matrices)


def read_states(model: Any, item: ActionBatch) -> tuple[Tensor, Tensor]:
    """States that predict each token (M, 7, D), and mid-depth states after the prompt (M, D)."""
    features = item.pictures
    if features.dim() == 4:
        features = model.vision_backbone(features)
    features = model.projector(features)
    embeds = model.get_input_embeddings()(item.ids)
    marks = item.ids.eq(model.config.image_token_id)
    embeds = embeds.masked_scatter(marks[..., None], features)
    here, there = item.groups[:, :, None], item.groups[:, None, :]
    length = item.ids.shape[1]
    earlier = torch.ones(length, length, dtype=torch.bool).tril()
    seen = earlier & ((there == 0) | (there == here))
    decoder = model.language_model.model
    outputs: list[Tensor] = []
    middle = decoder.layers[(len(decoder.layers) - 1) // 2]
    hook = middle.register_forward_hook(
        lambda _, __, out: outputs.append(out[0] if isinstance(out, tuple) else out)
    )
    out = decoder(
        inputs_embeds=embeds,
        attention_mask=seen[:, None],
        position_ids=item.positions,
        use_cache=False,
    ).last_hidden_state
    hook.remove()
    return out.flatten(0, 1)[item.answers], outputs[0].flatten(0, 1)[item.answers[:, 0]]


def foresight_loss(guesses: Tensor, logits: Tensor, actions: Tensor, codes: ActionCodes) -> Tensor:
    """Errors of predictions of later components, against the expert's and the policy's own values.

    guesses: (M, 7, 7), of each component at each token; logits: (M, 7, V); actions: (M, 7)
    normalised. The policy's own values are the means of its distributions; gradients also pull
    these towards the earlier predictions.
    """
    ids = codes.vocabulary - 1 - torch.arange(codes.bins - 1)
    own = logits[..., ids].float().softmax(-1) @ codes.centers.float()
    later = torch.ones(7, 7, dtype=torch.bool).triu()
    scale = (codes.bins - 1) / 2 / _UNIT

    def off(values: Tensor) -> Tensor:
        targets = values[:, None].expand_as(guesses)[:, later].float()
        return functional.smooth_l1_loss(scale * guesses[:, later], scale * targets)

    return off(actions) + off(own)


def action_loss(logits: Tensor, actions: Tensor, space: ActionSpace) -> Tensor:
    """Cross entropy (7,) of each component against a distribution around the expert's value.

    logits: (M, 7, V); actions: (M, 7) normalised. The gripper has a one-hot target.
    """
    codes = space.codes
    at = (actions[:, :6] + 1) / 2 * (codes.bins - 1)  # in bins
    middles = torch.arange(codes.bins - 1) + 0.5
    distribution = (-((middles - at[..., None]) / _WIDTH).square() / 2).softmax(-1).float()
    scores = logits.float().log_softmax(-1)
    ids = codes.vocabulary - 1 - torch.arange(codes.bins - 1)
    moves = -(distribution * scores[:, :6][..., ids]).sum(-1).mean(0)
    grip = functional.nll_loss(scores[:, 6], space.encode(actions)[:, 6])
    return torch.cat((moves, grip[None]))
