"""Train Mixture of Attentions on drafts of several tokens, as they are read in drafting."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmspec.drafters.neural.feature_head import check_head
from mmspec.drafters.neural.head_prompt import head_prompt
from mmspec.models.heads.mixture_of_attentions import (
    MixtureOfAttentions,
    MixtureOfAttentionsConfig,
)
from mmspec.targets.readers.reader import Reader
from mmspec.training.heads import TrainingExample, read_example, required_inputs
from mmspec.training.losses import soft_cross_entropy
from mmspec.training.self_fed import unroll_passes
from mmspec.training.trainable import HeadTraining


def mixture_loss(
    reader: Reader, head: MixtureOfAttentions, example: TrainingExample, passes: int = 5
) -> Tensor:  # ()
    """Cross entropy against the target's distributions, in mean over `passes`.

    In pass i a slot reads the states of all tokens but the last i (the paper's T-step bounded mask,
    here for every i below T = `passes`).
    """
    read = read_example(reader, example, *required_inputs(head, reader))
    prompt, length = head_prompt(head, reader, read.prompt), read.next.shape[1]
    distributions = reader.head(read.next)
    total = torch.zeros((), device=distributions.device)
    count = min(passes, read.longest_response)
    for late, own in enumerate(unroll_passes(head, prompt, length, count)):
        real = read.is_followed(read.real, late)
        if bool(real.any()):
            logits = head.logits(own[:, : length - late][real], reader.head)
            total = total + soft_cross_entropy(logits, distributions[:, late:][real])
    return total / count


def new_mixture(target: Reader, counts: Tensor, **changes: Any) -> MixtureOfAttentions:
    """Make an untrained head for a target."""
    config = MixtureOfAttentionsConfig.of(target.config, target.vocabulary, **changes)
    return MixtureOfAttentions(config)


MIXTURE = HeadTraining(new_mixture, mixture_loss, check_head, rate=3e-4, is_packable=True)
