"""Beam search of transformers as a state machine, one request and one token at a time.

The bookkeeping is that of `generate(num_beams=N)`, by its own private functions; contract tests are
in `tests/test_hf_beams.py`. No other module calls them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, StoppingCriteriaList

UNSTARTED = -1e9  # score of beams that do not exist yet, as in `generate()`

# Since this release `generate()` sorts drawn continuations by their scores, so beams that end are
# the best of all draws; before, they were the first ones drawn.
SORTS_DRAWS = Version(transformers.__version__) >= Version("5.24")


class PathNoise(Protocol):
    """Noise of the continuations of N beams."""

    @property
    def key(self) -> Tensor: ...  # (N,)

    def gumbel(self, size: int) -> Tensor: ...  # (N, size)
    def extend(self, parents: Tensor, tokens: Tensor) -> PathNoise: ...  # (N,) each


class BeamSearch:
    """The beams of one request; `advance` adds a token to each.

    `prompt` (L,) are its ids, padding included, `config` is a resolved one, and `processors` are
    called with (N, L) ids and (N, V) log probabilities. After a step `parents` and `tokens` (N
    each) tell which earlier beam each beam extends, and by what; `scores` (N,) are the sums of log
    probabilities.

    With `noise`, of N equal keys at first, continuations are drawn without replacement from the
    softmax of their scores, as `do_sample=True` draws them: those with the largest sums of score
    and Gumbel noise (Kool et al. 2019), in the order of `SORTS_DRAWS`. The noise of a continuation
    depends on its tokens alone, so a search is the same whatever was drafted.
    """

    def __init__(
        self,
        config: GenerationConfig,
        prompt: Tensor,
        processors: Sequence[Any],
        criteria: StoppingCriteriaList,
        noise: PathNoise | None = None,
    ) -> None:
        self.config, self.processors, self.criteria = config, tuple(processors), criteria
        eos = vars(config).get("_eos_token_tensor")
        self.eos: list[int] = [] if eos is None else eos.tolist()
        self.prompt_length = self.length = len(prompt)
        beams, total = int(config.num_beams), int(config.max_length)
        self.sequences = prompt.new_full((1, beams, total), self._fill_value())
        self.sequences[:, :, : len(prompt)] = prompt
        self.finished_sequences = self.sequences.clone()
        self.running_scores = torch.full((1, beams), UNSTARTED, device=prompt.device)
        self.running_scores[:, 0] = 0
        self.finished_scores = torch.full_like(self.running_scores, UNSTARTED)
        self.is_finished = torch.zeros_like(self.running_scores, dtype=torch.bool)
        self.can_improve = self.is_finished.new_ones(1, 1)
        self.indices = torch.full(
            (1, beams, total - len(prompt)), -1, dtype=torch.int32, device=prompt.device
        )
        self.finished_indices = self.indices.clone()
        self.is_done = False
        self.noise = noise
        self.parents: list[int] = [0] * beams
        self.tokens: list[int] = []

    def _fill_value(self) -> int:
        """What pads the returned sequences, as in `generate()`."""
        pad, eos = vars(self.config).get("_pad_token_tensor"), self.eos
        return int(pad or eos[0]) if eos else -1

    @property
    def num_beams(self) -> int:
        return self.sequences.shape[1]

    @property
    def num_candidates(self) -> int:
        """Continuations that are looked at: so many that N beams remain where others end."""
        return max(2, 1 + len(self.eos)) * self.num_beams

    @property
    def scores(self) -> Tensor:  # (N,)
        return self.running_scores[0]

    def accumulate(self, logits: Tensor) -> Tensor:  # (N, V) -> (N * V,)
        """Scores of all continuations: of the beam, and the processed log probability."""
        log_probs = logits.to(torch.float32).log_softmax(-1)
        ids = self.sequences[0, :, : self.length]
        for processor in self.processors:
            log_probs = processor(ids, log_probs)
        return (log_probs + self.running_scores[0, :, None]).flatten()

    def advance(self, logits: Tensor) -> None:  # (N, V), of the position after every beam
        """Add the best tokens."""
        total = self.accumulate(logits)
        noisy = total
        if self.noise is not None:
            noisy = total + self.noise.gumbel(logits.shape[-1]).flatten()
        chosen = noisy.topk(self.num_candidates).indices
        if self.noise is not None and not bool((total[chosen] > UNSTARTED / 2).all()):
            raise ValueError(
                f"do_sample=True with num_beams={self.num_beams} draws {self.num_candidates} "
                "different continuations, but fewer have a probability above 0; give a larger "
                "top_k or top_p, or fewer beams"
            )
        if self.noise is not None and SORTS_DRAWS:
            chosen = chosen[total[chosen].argsort(descending=True)]
        self.select(total, chosen)

    def select(self, total: Tensor, chosen: Tensor) -> None:  # (N * V,), (candidates,)
        """Add tokens: continuations by their place in `total`, the best first."""
        vocabulary = len(total) // self.num_beams
        beam = chosen[None] // vocabulary
        gather = GenerationMixin._gather_beams
        sequences, indices = gather(self.sequences, beam), gather(self.indices, beam)
        step, self.length = self.length, self.length + 1
        sequences[:, :, step] = chosen % vocabulary
        indices[:, :, step - self.prompt_length] = beam.to(indices.dtype)
        scores = total[chosen][None]
        hits = self.criteria(sequences[0, :, : step + 1], None)[None]
        own: Any = GenerationMixin  # these functions use its static methods only
        running = own._get_running_beams_for_next_iteration(
            own, scores, sequences, indices, hits, self.num_beams
        )
        self._update_finished(scores, sequences, indices, hits)
        self.sequences, self.running_scores, self.indices = running
        self._update_done(hits)
        newest = (self.indices[0, :, step - self.prompt_length], self.sequences[0, :, step])
        if self.noise is not None:
            self.noise = self.noise.extend(*newest)
        found = torch.stack((*newest, self.scores.isnan()))
        self.parents, self.tokens, broken = found.tolist()
        if any(broken):
            raise ValueError(
                f"the target returned NaN after {step - self.prompt_length} tokens of its beams; "
                "load it in a wider dtype, such as torch.float32"
            )

    def _update_finished(
        self, scores: Tensor, sequences: Tensor, indices: Tensor, hits: Tensor
    ) -> None:
        own: Any = GenerationMixin
        is_top = torch.arange(scores.shape[1], device=scores.device) < self.num_beams
        found = own._update_finished_beams(
            own,
            sequences=self.finished_sequences,
            topk_running_sequences=sequences,
            beam_scores=self.finished_scores,
            topk_log_probs=scores,
            beam_indices=self.finished_indices,
            topk_running_beam_indices=indices,
            is_early_stop_heuristic_unsatisfied=self.can_improve,
            is_sent_finished=self.is_finished,
            next_token_hits_stopping_criteria=hits,
            top_num_beam_mask=is_top,
            num_beams=self.num_beams,
            cur_len=self.length - 1,
            decoder_prompt_len=self.prompt_length,
            length_penalty=self.config.length_penalty,
            early_stopping=self.config.early_stopping,
        )
        self.finished_sequences, self.finished_scores = found[:2]
        self.finished_indices, self.is_finished = found[2:]

    def _update_done(self, hits: Tensor) -> None:
        own: Any = GenerationMixin
        self.can_improve = own._check_early_stop_heuristic(
            is_early_stop_heuristic_unsatisfied=self.can_improve,
            running_beam_scores=self.running_scores,
            beam_scores=self.finished_scores,
            is_sent_finished=self.is_finished,
            cur_len=self.length,
            max_length=self.config.max_length,
            decoder_prompt_len=self.prompt_length,
            early_stopping=self.config.early_stopping,
            length_penalty=self.config.length_penalty,
        )
        self.is_done = not own._beam_search_has_unfinished_sequences(
            self.can_improve, self.is_finished, hits, self.config.early_stopping
        )


def best_sequences(searches: Sequence[BeamSearch]) -> tuple[Tensor, Tensor]:
    """The returned sequences (B * R, L + T) of finished searches, and their scores (B * R,)."""
    count = searches[0].config.num_return_sequences
    parts = [(one.finished_sequences, one.finished_indices) for one in searches]
    sequences, indices = (
        torch.cat(rows)[:, :count].flatten(0, 1) for rows in zip(*parts, strict=True)
    )
    longest = int((indices >= 0).sum(1).max())
    scores = torch.cat([one.finished_scores[:, :count] for one in searches]).flatten()
    return sequences[:, : searches[0].prompt_length + longest], scores
