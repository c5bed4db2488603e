"""Encode conversations about one image: training batches, and inputs of `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmspec.zoo.requests import Request
from mmspec.zoo.scene_tensors import render_pixels
from tools.zoo.vlm.batches import IGNORED, Batch
from tools.zoo.vlm.families import IMAGE_TOKENS, ZooFamily


class ConversationEncoder:
    """Encodes conversations about one image with the chat template of a processor."""

    def __init__(self, family: ZooFamily, processor: Any) -> None:
        self.family, self.processor, self.tokenizer = family, processor, processor.tokenizer

    def prompt(self, request: Request, answers: Sequence[str]) -> list[int]:
        """Token ids of the turns that were answered, and of the prompt of the next one."""
        content = [{"type": "image"}, {"type": "text", "text": request.turns[0].prompt}]
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        for answer, turn in zip(answers, request.turns[1:], strict=False):
            messages.append({"role": "assistant", "content": answer})
            messages.append({"role": "user", "content": turn.prompt})
        text = self.processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        token = self.family.image_token
        ids: list[int] = self.tokenizer(text.replace(token, token * IMAGE_TOKENS)).input_ids
        return ids

    def encode(self, conversations: Sequence[Request]) -> Batch:
        """Encode whole conversations; the labels are the tokens of their answers."""
        rows = [self._encode(one) for one in conversations]
        longest = max(len(ids) for ids, _ in rows)
        ids = torch.full((len(rows), longest), self.tokenizer.pad_token_id)
        labels = torch.full_like(ids, IGNORED)
        for i, (row, known) in enumerate(rows):
            ids[i, : len(row)], labels[i, : len(row)] = torch.tensor(row), torch.tensor(known)
        images = np.stack([render_pixels(one.scene) for one in conversations])
        return Batch(images, ids, labels)

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
    inputs |= family.image_inputs(np.stack([render_pixels(one.scene) for one in asked]))
    if family.positions_from_types:
        token = encoder.tokenizer.convert_tokens_to_ids(family.image_token)
        inputs["mm_token_type_ids"] = (ids == token).int()
    return inputs
