"""Encode conversations about one scene: training batches, and inputs of `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmspec.modalities.common.formatting import get_tokenizer
from mmspec.modalities.vlm.formatting import format_chat
from mmspec.zoo.requests import Request, write_scene_into_prompt
from mmspec.zoo.scene_tensors import render_pixels
from tools.zoo.vlm.batches import IGNORED, Batch
from tools.zoo.vlm.families import IMAGE_TOKENS, ZooFamily


class ConversationEncoder:
    """Encodes conversations about one scene with the chat template of a processor.

    Without a family, of text models, the first prompt describes the scene.
    """

    def __init__(self, family: ZooFamily | None, processor: Any) -> None:
        self.family, self.processor = family, processor
        self.tokenizer = get_tokenizer(processor)

    def prompt(self, request: Request, answers: Sequence[str]) -> list[int]:
        """Token ids of the turns that were answered, and of the prompt of the next one."""
        shown = write_scene_into_prompt(request) if self.family is None else request
        prompts = [turn.prompt for turn in shown.turns[: len(answers) + 1]]
        turns = list(zip(prompts, answers, strict=False))
        kinds = () if self.family is None else ("image",)
        text = format_chat(self.processor, prompts[-1], kinds, turns)
        if self.family is not None:
            token = self.family.image_token
            text = text.replace(token, token * IMAGE_TOKENS)
        ids: list[int] = self.tokenizer(text).input_ids
        return ids

    def images(self, asked: Sequence[Request]) -> np.ndarray:  # (B, P, P, 3) bytes
        """Render the scenes; without a family (B, 0)."""
        if self.family is None:
            return np.empty((len(asked), 0), np.uint8)
        return np.stack([render_pixels(one.scene) for one in asked])

    def encode(self, conversations: Sequence[Request]) -> Batch:
        """Encode whole conversations; the labels are the tokens of their answers."""
        rows = [self._encode(one) for one in conversations]
        longest = max(len(ids) for ids, _ in rows)
        ids = torch.full((len(rows), longest), self.tokenizer.pad_token_id)
        labels = torch.full_like(ids, IGNORED)
        for i, (row, known) in enumerate(rows):
            ids[i, : len(row)], labels[i, : len(row)] = torch.tensor(row), torch.tensor(known)
        return Batch(self.images(conversations), ids, labels)

    def _encode(self, conversation: Request) -> tuple[list[int], list[int]]:
        answers = [turn.answer for turn in conversation.turns]
        row: list[int] = []
        labels: list[int] = []
        for i, answer in enumerate(answers):
            row = self.prompt(conversation, answers[:i])
            labels += [IGNORED] * (len(row) - len(labels))
            tokens = [*self.tokenizer(answer).input_ids, self.tokenizer.eos_token_id]
            row, labels = row + tokens, labels + tokens
        return row, labels


def make_inputs(
    encoder: ConversationEncoder, asked: Sequence[Request], answers: Sequence[Sequence[str]]
) -> dict[str, Tensor]:
    """Return inputs of `generate`: the conversations so far, padded on the left, and images."""
    family, pad = encoder.family, encoder.tokenizer.pad_token_id
    rows = [encoder.prompt(one, texts) for one, texts in zip(asked, answers, strict=True)]
    longest = max(map(len, rows))
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    inputs = {"input_ids": ids, "attention_mask": mask}
    if family is None:
        return inputs
    inputs |= family.image_inputs(encoder.images(asked))
    if family.positions_from_types:
        token = encoder.tokenizer.convert_tokens_to_ids(family.image_token)
        inputs["mm_token_type_ids"] = (ids == token).int()
    return inputs
