"""Train a CTC head: the slots after a token shall collapse to the tokens that follow it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.drafters.neural.feature_head import check_head
from mmspec.drafters.neural.head_prompt import head_prompt
from mmspec.models.heads.ctc_head import CtcHead, CtcHeadConfig
from mmspec.targets.readers.reader import Reader
from mmspec.training.heads import (
    TrainingExample,
    gather_slots,
    read_example,
    required_inputs,
    run_on_prompt,
)
from mmspec.training.trainable import HeadTraining


def ctc_loss(
    reader: Reader, head: CtcHead, example: TrainingExample, anchors: int = 64
) -> Tensor:  # ()
    """CTC loss of the next `num_labels` tokens after random response tokens, in mean over them.

    At most `anchors` tokens of each row; fewer labels at the end of a response. A text with so many
    repetitions that its labels and blanks do not fit into the slots is left out.
    """
    read = read_example(reader, example, *required_inputs(head, reader))
    prompt, length = head_prompt(head, reader, read.prompt), read.next.shape[1]
    hidden = gather_slots(run_on_prompt(head, prompt), prompt.response_slots(length))
    starts = torch.randperm(max(length - 1, 1))[:anchors].sort().values.to(hidden.device)
    logits = head.logits(head.predict_slots(hidden[:, starts]), reader.head)  # (R, A, K, V + 1)
    tokens = example.tokens.repeat(len(hidden) // len(example.tokens), 1)
    places = starts[:, None] + torch.arange(1, head.config.num_labels + 1, device=starts.device)
    is_label = (places < length) & (tokens[:, places.clamp_max(length - 1)] >= 0)  # (R, A, L)
    labels = tokens[:, places.clamp_max(length - 1)].clamp_min(0)
    counts = is_label.sum(-1).flatten()
    used = counts > 0
    if not bool(used.any()):
        return 0.0 * logits.sum()
    log_probs = logits.flatten(0, 1)[used].float().log_softmax(-1).transpose(0, 1)  # (K, n, V + 1)
    losses = functional.ctc_loss(
        log_probs,
        labels.flatten(0, 1)[used],
        torch.full_like(counts[used], head.reach),
        counts[used],
        blank=logits.shape[-1] - 1,
        reduction="none",
        zero_infinity=True,
    )
    loss: Tensor = losses.mean()
    return loss


def new_ctc_head(target: Reader, counts: Tensor, **changes: Any) -> CtcHead:
    """Make an untrained head for a target."""
    return CtcHead(CtcHeadConfig.of(target.config, target.vocabulary, **changes))


CTC = HeadTraining(new_ctc_head, ctc_loss, check_head, rate=1e-3)
