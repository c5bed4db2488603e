"""A draft model that learns from its refused tokens while it serves (OSD)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn

from mmspec._attributes import delegate_to
from mmspec.distributions.categorical import Categorical
from mmspec.draft import Draft, Drafter, Kind, Round, Scores
from mmspec.drafters.draft_model import move_tensors
from mmspec.drafters.neural.draft_inputs import build_draft_inputs, check_token_prompts
from mmspec.drafters.neural.small_model import Autoregressive, SmallModel, build_autoregressive
from mmspec.errors import check_number
from mmspec.recipe import Kit
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.context import Context, append_tokens


@dataclass
class RefusedTokens:
    """The tokens of a finished request, and the target's distributions where it refused a draft.

    Tokens are padded on the right.
    """

    inputs: Any  # of the draft model's prompt
    tokens: Tensor  # (B, T) int64
    rows: Tensor  # (n,) row of each refused token
    steps: Tensor  # (n,) its index among the new tokens
    target: Tensor  # (n, V) p there, after temperature and processors


class OnlineLearner:
    """AdamW on KL(p || q) at refused tokens, one step every `every` requests (Liu et al. 2024).

    The weights of the draft model are changed in place, and only between requests: no lock is held
    in a round, and a round never sees two states of them. Requests that overlap learn when none is
    running.
    """

    def __init__(self, reader: Reader, every: int = 1, rate: float = 1e-4) -> None:
        check_number("every", every, 1, whole=True, example=1)
        check_number("rate", rate, 0, example=1e-4)
        coarse = {str(one.dtype) for one in reader.model.parameters()} - {"torch.float32"}
        if coarse:
            raise ValueError(
                f"osd trains the draft model in place, but its weights are {', '.join(coarse)}, in "
                "which small updates vanish; load it in float32"
            )
        self.reader, self.every = reader, every
        self.optimizer = torch.optim.AdamW(reader.model.parameters(), lr=rate, weight_decay=0.0)
        self.examples: list[RefusedTokens] = []
        self.num_updates, self.last_loss = 0, 0.0
        self.running = WeakSet[Any]()  # states of requests; one that was given up is collected
        self._lock = Lock()

    def start(self, state: Any) -> None:
        """Note a request that runs; if it is the only one, train on waiting examples before it."""
        with self._lock:
            self._update_if_idle()
            self.running.add(state)

    def finish(self, state: Any, example: RefusedTokens | None) -> None:
        """Note the end of a request; at most `every` examples wait."""
        with self._lock:
            self.running.discard(state)
            if example is not None:
                self.examples = [*self.examples, example][-self.every :]
            self._update_if_idle()

    def _update_if_idle(self) -> None:
        if not self.running and len(self.examples) >= self.every:
            self._update()

    def _update(self) -> None:
        model, wanted = self.reader.model, [*self.reader.model.parameters()]
        frozen = [weight for weight in wanted if not weight.requires_grad]
        with torch.inference_mode(False), torch.enable_grad():
            model.requires_grad_(True)
            losses = [online_loss(self.reader, example) for example in self.examples]
            loss = torch.stack(losses).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(wanted, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        for weight in frozen:
            weight.requires_grad_(False)
        self.examples, self.last_loss = [], float(loss)
        self.num_updates += 1


def online_loss(reader: Reader, example: RefusedTokens) -> Tensor:  # ()
    """-sum p log q, the mean over refused tokens: KL(p || q) up to a constant."""
    inputs = append_tokens(reader, example.inputs, example.tokens)
    out = reader.model(**inputs, use_cache=False, return_dict=True).logits
    logits = reader.divide_logits(out[:, -example.tokens.shape[1] - 1 : -1])
    own = logits[example.rows, example.steps].float().log_softmax(-1)
    target = example.target[:, : own.shape[-1]].float()
    loss: Tensor = -(target * own.clamp_min(-100.0)).sum(-1).mean()
    return loss


@dataclass(eq=False)
class _OnlineState:
    inner: Any = None
    refused: list[tuple[int, int, Tensor]] = field(default_factory=list)  # row, step, p (V,)
    is_over: bool = False


@dataclass(frozen=True)
class OnlineDrafter(Drafter):
    """Drafts with `drafter`, and hands refused tokens to `learner` when a request ends.

    Online speculative decoding. Exact: what it learns changes the proposals of later requests, and
    every draft records the distribution that it was drawn from. A request that is not decoded to
    its end is not trained on.
    """

    drafter: Autoregressive
    learner: OnlineLearner

    kinds = delegate_to("drafter.kinds")
    sees = delegate_to("drafter.sees")
    required_features = delegate_to("drafter.required_features")
    reads_prompt = delegate_to("drafter.reads_prompt")
    uses_trees = delegate_to("drafter.uses_trees")

    def with_kind(self, kind: Kind) -> OnlineDrafter:
        own: Any = self.drafter.with_kind(kind)
        return replace(self, drafter=own)

    def begin(self, context: Context) -> _OnlineState:
        state = _OnlineState()
        self.learner.start(state)
        state.inner = self.drafter.begin(context)
        return state

    def propose(self, context: Context, state: _OnlineState) -> Draft:
        return self.drafter.propose(context, state.inner)

    def token_probs(self, state: _OnlineState, draft: Draft) -> Tensor | None:
        return self.drafter.token_probs(state.inner, draft)

    def cache_bytes(self, state: _OnlineState) -> int | None:
        return self.drafter.cache_bytes(state.inner)

    def observe(
        self, context: Context, state: _OnlineState, draft: Draft, scores: Scores, round_: Round
    ) -> _OnlineState:
        state.inner = self.drafter.observe(context, state.inner, draft, scores, round_)
        if draft.nodes:
            state.refused += _refused_tokens(context, draft, scores, round_)
        if all(round_.finished) and not state.is_over:
            state.is_over = True
            self.learner.finish(state, self._make_example(context, state))
        return state

    def _make_example(self, context: Context, state: _OnlineState) -> RefusedTokens | None:
        if not state.refused:
            return None
        model: Any = self.drafter.model
        reader = model.backbone
        inputs = move_tensors(model.inputs.build(context, reader), reader.device)
        new = context.generated_tokens()
        width = max(map(len, new))
        tokens = [[*row, *[row[-1]] * (width - len(row))] for row in new]
        rows, steps, target = zip(*state.refused, strict=True)
        place: Any = {"device": reader.device}
        distributions = torch.stack(target).to(reader.device)
        return RefusedTokens(
            inputs,
            torch.tensor(tokens, **place),
            torch.tensor(rows, **place),
            torch.tensor(steps, **place),
            distributions,
        )


def _refused_tokens(
    context: Context, draft: Draft, scores: Scores, round_: Round
) -> list[tuple[int, int, Tensor]]:
    """The first refused token of each row: row, index among its new tokens, p there (V,)."""
    found = []
    for row, (path, new, generated) in enumerate(
        zip(round_.path, round_.tokens, context.generated_tokens(), strict=True)
    ):
        if len(path) >= len(new):  # the row ended within its draft
            continue
        at = path[-1] + 1 if path else 0
        if bool((draft.parents[row] == at - 1).any()):  # there was a proposal
            step = len(generated) - len(new) + len(path)
            p = cast(Categorical, scores.distribution).probs
            found.append((row, step, p[row, at]))
    return found


def online_model(kit: Kit) -> Drafter:
    """A small model that learns.

    Raises ValueError for a head, whose inputs are not kept, for a draft model that shares weights
    with the target, and for prompts that are not of the target's vocabulary.
    """
    if not isinstance(kit.drafter, Reader):
        raise ValueError(
            "osd trains a whole draft model, and a head reads states of the target that are not "
            "kept; give drafter= a small model, or train the head with `mmspec train`"
        )
    check_token_prompts(kit.target, "osd trains on the request")
    drafter = build_autoregressive(kit, SmallModel(kit.drafter, build_draft_inputs(kit)))
    learner = OnlineLearner(kit.drafter, kit.options["every"], kit.options["rate"])
    shared = find_shared_weights(kit.drafter.model, kit.target.model)
    if shared:
        raise ValueError(
            f"osd trains the draft model in place, and would change the target, which shares "
            f"{len(shared)} of its weights, such as {shared[0]}; give drafter= a model of its own, "
            "such as copy.deepcopy(drafter)"
        )
    return OnlineDrafter(drafter, learner)


def find_shared_weights(model: nn.Module, other: nn.Module) -> list[str]:
    """Names of the weights of `model` whose memory is that of weights of `other`."""
    memory = {weight.untyped_storage().data_ptr() for weight in other.parameters()} - {0}
    return [
        name
        for name, weight in model.named_parameters()
        if weight.untyped_storage().data_ptr() in memory
    ]
