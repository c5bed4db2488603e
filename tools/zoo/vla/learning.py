"""Teach a policy: its towers to see table and hand, then all of it to say the expert's actions."""

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
from mmspec.training.fitting import Course, Fall, divided, fit, shuffled
from mmspec.zoo.boards import BOARD_CLASSES, board, board_loss
from tools.zoo.vla.architecture import PATCH, PIXELS, PROMPT, WIDTH
from tools.zoo.vla.frames import TableFrames

_POSE = np.array([0.3, 0.3, 0.25, 1.0, 1.0, 1.0, 1.0])  # what makes poses even
_WIDTH = 4.0  # bins: how far the distribution that is taught spreads around the expert's value
_OFF = 5.0  # bins: how far what is read of an answer is off
_FORESIGHT = 0.3  # what foresight weighs beside what is said
_UNIT = 10.0  # bins that an action foreseen is off count as one


@dataclass(frozen=True)
class ActionBatch:
    """Pictures, and behind each several questions with their answers, which do not see each other.

    pictures: (B, 6, P, P), or what the towers make of them, (B, N, W); ids, positions, groups: (B,
    L), group 0 is what all questions begin with, the picture and some words, and -1 padding;
    answers: (M, 7) places in the flat (B * L) of what leads to each token; actions: (M, 7)
    normalised; aims: (M, 9) goal and pose.
    """

    pictures: Tensor
    ids: Tensor
    positions: Tensor
    groups: Tensor
    answers: Tensor
    actions: Tensor
    aims: Tensor


class ActionTeacher:
    """Makes batches of frames; with `features` (N, P, W) of what frozen towers see in them."""

    def __init__(
        self,
        taught: TableFrames,
        model: Any,
        tokenizer: Any,
        space: ActionSpace,
        features: Tensor | None = None,
    ) -> None:
        self.taught, self.space, self.tokenizer = taught, space, tokenizer
        self.features = features
        known = sorted({one for asked in taught.asked for one in asked})
        prompts = [tokenizer(PROMPT.format(one)).input_ids for one in known]
        same = next(at for at, ids in enumerate(zip(*prompts, strict=False)) if len(set(ids)) > 1)
        picture = [model.config.image_token_id] * model.vision_backbone.patches
        self.opening = [*prompts[0][:1], *picture, *prompts[0][1:same]]
        self.prompts = {one: ids[same:] for one, ids in zip(known, prompts, strict=True)}

    def batches(self, batch: int, seed: int) -> Iterator[ActionBatch]:
        """Batches without end."""
        generator = np.random.default_rng((seed, 14))
        whole = len(self.taught) - len(self.taught) % batch
        for picked in shuffled(whole, batch, generator):
            yield self.batch(picked, generator)

    def batch(self, picked: np.ndarray, generator: np.random.Generator) -> ActionBatch:
        """A batch of these frames; what is read of an answer is a little off."""
        taught = self.taught
        goals = [taught.goals[i] for i in picked]
        counts = [len(one) for one in goals]
        raw = torch.from_numpy(np.concatenate([taught.actions[i] for i in picked]))
        actions = self.space.normalise(raw)
        read = self.tokens(shaken(actions, generator))
        poses = np.repeat(taught.poses[picked] / _POSE, counts, axis=0)
        aims = np.concatenate((np.concatenate(goals) / _POSE[:2], poses), 1)
        rows, said = [], iter(read.tolist())
        for i, count in zip(picked, counts, strict=True):
            rows.append([(taught.asked[i][k], next(said)) for k in range(count)])
        ids, positions, groups, answers = self._packed(rows)
        known = self.features
        shown = pixel_values(taught.images[picked]) if known is None else known[picked].float()
        return ActionBatch(
            shown,
            *(ids, positions, groups, answers),
            actions,
            torch.from_numpy(aims).float(),
        )

    def tokens(self, actions: Tensor) -> Tensor:  # (..., 7) normalised -> (..., 7)
        """Ids; the value 1 of a scaled component gets the id that decodes to it in the middle."""
        below = torch.cat((actions[..., :6].clamp_max(1 - 1e-6), actions[..., 6:]), -1)
        return self.space.tokens(below)

    def _packed(
        self, rows: list[list[tuple[str, list[int]]]]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """ids, positions, groups (B, L), and the places that lead to answers (M, 7)."""
        ids, positions, groups, ends = [], [], [], []
        start = len(self.opening)
        for row in rows:
            line, place, group, end = [*self.opening], [*range(start)], [0] * start, []
            for number, (asked, answer) in enumerate(row, 1):
                said = [*self.prompts[asked], *answer[:-1]]
                line += said
                place += range(start, start + len(said))
                group += [number] * len(said)
                end.append(len(line) - len(answer))
            ids.append(torch.tensor(line))
            positions.append(torch.tensor(place))
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


def shaken(actions: Tensor, generator: np.random.Generator) -> Tensor:  # (M, 7)
    """Answers as a policy would give them: off by some bins."""
    off = torch.from_numpy(generator.normal(0, _OFF * 2 / 255, tuple(actions.shape)))
    off[:, 6] = 0
    return (actions + off).clamp(-1, 1)


def pixel_values(images: np.ndarray) -> Tensor:  # (B, P, P, 3) bytes -> (B, 6, P, P)
    """As the processor hands them over: -1 to 1 for either tower."""
    values = torch.from_numpy(images).permute(0, 3, 1, 2).float().div(127.5).sub(1)
    return values.repeat(1, 2, 1, 1)


def learn_to_see(model: Any, taught: TableFrames, batch: int, fall: Fall, course: Course) -> None:
    """Train the towers to tell what lies in each of the nine cells, and the pose of the hand."""
    towers = model.vision_backbone
    side = PIXELS // PATCH
    things = nn.Linear(towers.width, sum(BOARD_CLASSES))
    hand = nn.Linear(towers.width * side * side, 7)
    boards = torch.stack([board(scene) for scene in taught.scenes])
    poses = torch.from_numpy(taught.poses / _POSE).float()

    def loss_of(picked: np.ndarray) -> Tensor:
        seen = towers(pixel_values(taught.images[picked]))
        cells = einops.reduce(seen, "b (r m c n) d -> b (r c) d", "mean", r=3, m=2, c=3, n=2)
        off = functional.mse_loss(hand(seen.flatten(1)), poses[picked])
        return board_loss(things(cells), boards[picked]) + 30 * off

    items = shuffled(len(taught) // batch * batch, batch, np.random.default_rng(course.seed))
    learnt = used_by(towers)
    matrices = [p for p in divided(towers, [])[0] if is_in(p, learnt)]
    others = [p for p in learnt if not is_in(p, matrices)]
    others += [*things.parameters(), *hand.parameters()]
    fit(others, items, loss_of, fall, "see", course, matrices=matrices)


@torch.no_grad()
def looks(model: Any, taught: TableFrames) -> Tensor:
    """(N, P, W) float16, what the towers make of all pictures."""
    parts = np.array_split(np.arange(len(taught)), -(-len(taught) // 64))
    towers = model.vision_backbone
    return torch.cat([towers(pixel_values(taught.images[part])).half() for part in parts])


def is_in(parameter: nn.Parameter, some: Iterable[nn.Parameter]) -> bool:
    """Whether it is one of them."""
    return any(parameter is one for one in some)


def used_by(module: nn.Module) -> list[nn.Parameter]:
    """Parameters of towers but for their last blocks, which features do not come from."""
    return [
        p
        for name, p in module.named_parameters()
        if ".blocks.2." not in name and "featurizer.norm." not in name
    ]


def learn_to_act(
    model: Any, teacher: ActionTeacher, batch: int, fall: Fall, course: Course, aim: float = 5.0
) -> None:
    """Train a policy to say the expert's actions; `aim` weighs finding goal and hand midway.

    Each state is to tell the rest of the action too (see `foresight_loss`), so that a small head
    can draft it. Towers whose features the teacher holds stay as they are.
    """
    compass, ahead = nn.Linear(WIDTH, 9), nn.Linear(WIDTH, 7)
    for linear in (compass, ahead):  # at first they change nothing of what is there
        nn.init.zeros_(linear.weight)

    def loss_of(item: ActionBatch) -> Tensor:
        hidden, midway = states(model, item)
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
    learnt = used_by(nn.ModuleList(parts))
    matrices = [p for p in divided(nn.ModuleList(layers), [])[0] if is_in(p, learnt)]
    told = [*compass.parameters(), *ahead.parameters()]
    others = [p for p in [*learnt, *told] if not is_in(p, matrices)]
    fit(others, teacher.batches(batch, course.seed), loss_of, fall, "act", course, matrices)


def states(model: Any, item: ActionBatch) -> tuple[Tensor, Tensor]:
    """What leads to each token (M, 7, D), and (M, D) midway behind the whole question."""
    shown = item.pictures
    features = model.projector(model.vision_backbone(shown) if shown.dim() == 4 else shown)
    embeds = model.get_input_embeddings()(item.ids)
    marks = item.ids.eq(model.config.image_token_id)
    embeds = embeds.masked_scatter(marks[..., None], features)
    here, there = item.groups[:, :, None], item.groups[:, None, :]
    length = item.ids.shape[1]
    earlier = torch.ones(length, length, dtype=torch.bool).tril()
    seen = earlier & ((there == 0) | (there == here))
    decoder = model.language_model.model
    kept: list[Tensor] = []
    middle = decoder.layers[(len(decoder.layers) - 1) // 2]
    hook = middle.register_forward_hook(
        lambda _, __, out: kept.append(out[0] if isinstance(out, tuple) else out)
    )
    out = decoder(
        inputs_embeds=embeds,
        attention_mask=seen[:, None],
        position_ids=item.positions,
        use_cache=False,
    ).last_hidden_state
    hook.remove()
    return out.flatten(0, 1)[item.answers], kept[0].flatten(0, 1)[item.answers[:, 0]]


def foresight_loss(guesses: Tensor, logits: Tensor, actions: Tensor, codes: ActionCodes) -> Tensor:
    """How far guesses of components not yet said are off, from the expert's and the policy's own.

    guesses: (M, 7, 7), of each component at each token; logits: (M, 7, V); actions: (M, 7)
    normalised. The policy's own are the means of its distributions, which are drawn towards what it
    guessed before: what it says later is what it had in mind.
    """
    ids = codes.vocabulary - 1 - torch.arange(codes.bins - 1)
    own = logits[..., ids].float().softmax(-1) @ codes.centers.float()
    later = torch.ones(7, 7, dtype=torch.bool).triu()
    scale = (codes.bins - 1) / 2 / _UNIT

    def off(values: Tensor) -> Tensor:
        wanted = values[:, None].expand_as(guesses)[:, later].float()
        return functional.smooth_l1_loss(scale * guesses[:, later], scale * wanted)

    return off(actions) + off(own)


def action_loss(logits: Tensor, actions: Tensor, space: ActionSpace) -> Tensor:
    """Cross entropy (7,) of each component against a distribution around the expert's value.

    logits: (M, 7, V); actions: (M, 7) normalised. The gripper is taught as it is.
    """
    codes = space.codes
    at = (actions[:, :6] + 1) / 2 * (codes.bins - 1)  # in bins
    middles = torch.arange(codes.bins - 1) + 0.5
    distribution = (-((middles - at[..., None]) / _WIDTH).square() / 2).softmax(-1).float()
    said = logits.float().log_softmax(-1)
    ids = codes.vocabulary - 1 - torch.arange(codes.bins - 1)
    moves = -(distribution * said[:, :6][..., ids]).sum(-1).mean(0)
    grip = functional.nll_loss(said[:, 6], space.tokens(actions)[:, 6])
    return torch.cat((moves, grip[None]))
