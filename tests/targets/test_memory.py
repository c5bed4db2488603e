"""The memory of a request after any history of drafts is that of a fresh prefill."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import mmspec
from mmspec.draft import Draft, Kind, NodeInputs
from mmspec.drafters.oracle import Oracle
from mmspec.targets.memory import Memory, RowMemories, TokenBlock, build_block
from mmspec.targets.readers.reader import Reader
from mmspec.targets.slots import SlotLayer
from mmspec.targets.tokens.causal import CausalTarget
from mmspec.targets.tokens.context import Context
from mmspec.trees import Tree
from tests import toys
from tests.covering import covering

FAMILIES = ("llama", "mistral-sliding", "gemma3-text", "qwen2_5_vl")
RECURRENT = ("qwen3_5", "lfm2")
SHAPES = (Tree.branching([2, 2, 1]), Tree.chain(4), Tree((-1, -1, 0, 1, 1, 4)), Tree.chain(0))
Request = dict[str, Tensor]


def close(actual: Tensor, expected: Tensor) -> None:
    assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def backbone(family: str) -> Reader:
    made: Reader = mmspec.accelerate(toys.model(family), "plain").session.bound.backbone
    return made


@torch.no_grad()
def prefilled(body: Reader, request: Request, room: int = 64) -> Memory | RowMemories:
    memory: Memory | RowMemories = body.prefill(request, room)[0]
    return memory


@torch.no_grad()
def read(
    body: Reader,
    memory: Memory | RowMemories,
    waiting: Sequence[Sequence[int]],
    draft: Draft | None,
) -> Tensor:  # (B, 1 + N, V)
    return body.read(memory, build_block(waiting, draft, memory.like))[0]


def extended(request: Request, row: int, tokens: Sequence[int]) -> Request:
    """One row's prompt with more tokens behind it."""
    single = toys.alone(request, row)
    more = torch.tensor([list(tokens)], dtype=torch.int64)
    longer = {"input_ids": torch.cat((single["input_ids"], more), 1)}
    for name, value in (("attention_mask", 1), ("mm_token_type_ids", 0), ("token_type_ids", 0)):
        if name in single:
            longer[name] = torch.cat((single[name], torch.full_like(more, value)), 1)
    return {**single, **longer}


@torch.no_grad()
def fresh(body: Reader, request: Request, row: int, tokens: Sequence[int]) -> Tensor:  # (V,)
    """Next-token logits of a new request with these tokens."""
    logits: Tensor = body.prefill(extended(request, row, tokens), 8)[1][0]
    return logits


class Story:
    """Random drafts and random accepted paths, the same whoever reads them."""

    def __init__(self, batch: int, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.text = [[self.word()] for _ in range(batch)]  # the last word waits to be read

    def word(self) -> int:
        return self.random.choice(toys.WORDS)

    @property
    def waiting(self) -> list[list[int]]:
        return [row[-1:] for row in self.text]

    def draft(self, tree: Tree, shared: bool = True) -> Draft:
        tokens = torch.tensor([[self.word() for _ in range(tree.nodes)] for _ in self.text])
        draft = Draft.from_tree(tree, tokens.view(len(self.text), tree.nodes), Kind.DET)
        if shared:
            return draft
        return Draft(draft.tokens, draft.parents, draft.mask, draft.kind)  # as a dynamic tree

    def paths(self, tree: Tree) -> list[list[int]]:
        paths: list[list[int]] = []
        for _ in self.text:
            path: list[int] = []
            while children := tree.children[path[-1] + 1 if path else 0]:
                if self.random.random() < 0.25:
                    break
                path.append(self.random.choice(children))
            paths.append(path)
        return paths

    def go_on(self, draft: Draft, paths: Sequence[Sequence[int]]) -> None:
        for row, path in enumerate(paths):
            self.text[row] += [*draft.tokens[row, list(path)].tolist(), self.word()]


@pytest.mark.parametrize(
    ("family", "batch", "shared"), covering(tuple(FAMILIES), (1, 3), (True, False))
)
def test_what_is_kept_reads_like_a_fresh_prefill(family: str, batch: int, shared: bool) -> None:
    """Every distribution row used by a verdict: the root's, and that of the last accepted node."""
    body = backbone(family)
    request = toys.inputs(family, batch=batch, ragged=batch > 1)
    memory, story = prefilled(body, request), Story(batch)
    for tree in SHAPES * 2:
        draft = story.draft(tree, shared or tree.is_chain)
        logits = read(body, memory, story.waiting, draft)
        paths = story.paths(tree)
        for row, path in enumerate(paths):
            said = [*story.text[row], *draft.tokens[row, path].tolist()]
            place = path[-1] + 1 if path else 0
            close(logits[row, place], fresh(body, request, row, said))
        memory.commit([1] * batch, paths, tree.nodes)
        story.go_on(draft, paths)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rejected_draft_leaves_no_trace(family: str) -> None:
    body, request = backbone(family), toys.inputs(family)
    story = Story(1)
    drafted, plain = prefilled(body, request), prefilled(body, request)
    for tree in SHAPES:
        logits = read(body, drafted, story.waiting, story.draft(tree))
        close(logits[:, :1], read(body, plain, story.waiting, None))
        drafted.commit([1], [()], tree.nodes)
        plain.commit([1], [()], 0)
        story.text[0].append(story.word())
        assert drafted.lengths == plain.lengths


@pytest.mark.parametrize("family", [*FAMILIES, *RECURRENT])
def test_embeddings_are_read_in_place_of_tokens(family: str) -> None:
    """With the table's own rows nothing changes; with those of other tokens, what they say does."""
    body, request = backbone(family), toys.inputs(family, batch=3, ragged=True)
    story, tree = Story(3), Tree.chain(3) if family in RECURRENT else Tree((-1, -1, 0))
    draft, waiting = story.draft(tree), [row * count for count, row in enumerate(story.waiting, 1)]
    plain = read(body, prefilled(body, request), waiting, draft)
    same = replace(draft, node_inputs=NodeInputs(embeds=body.embed(draft.tokens).detach()))
    close(read(body, prefilled(body, request), waiting, same), plain)
    blank = replace(same, tokens=torch.zeros_like(draft.tokens))
    close(read(body, prefilled(body, request), waiting, blank), plain)
    other = replace(
        draft, node_inputs=NodeInputs(embeds=body.embed(story.draft(tree).tokens).detach())
    )
    changed = read(body, prefilled(body, request), waiting, other)
    close(changed[:, 0], plain[:, 0])
    assert not torch.allclose(changed[:, 1:], plain[:, 1:], atol=0.1)


@pytest.mark.parametrize("batch", [1, 2])
@torch.no_grad()
def test_a_draft_with_gaps_stands_where_it_says(batch: int) -> None:
    """The reference reads the same tokens at once, with positions of their own."""
    body, request = backbone("llama"), toys.inputs("llama", batch=batch, ragged=batch > 1)
    story, tree = Story(batch), Tree.chain(3)
    places = torch.tensor([[0, 3, 4], [2, 3, 9]])[:batch]
    draft = replace(story.draft(tree), node_inputs=NodeInputs(places))
    logits = read(body, prefilled(body, request), story.waiting, draft)
    for row in range(batch):
        prompt = toys.alone(request, row)["input_ids"][0].tolist()
        before = prompt + story.waiting[row]
        ids = torch.tensor([before + draft.tokens[row].tolist()])
        position = torch.tensor([[*range(len(before)), *(len(before) + places[row]).tolist()]])
        whole = {"input_ids": ids, "position_ids": position}
        expected = body.model(**whole, attention_mask=torch.ones_like(ids)).logits[0, -4:]
        close(logits[row], expected)
    close(logits[:, 0], read(body, prefilled(body, request), story.waiting, None)[:, 0])
    tight = replace(draft, node_inputs=NodeInputs(draft.depths()))
    close(
        read(body, prefilled(body, request), story.waiting, tight),
        read(body, prefilled(body, request), story.waiting, replace(draft, node_inputs=None)),
    )


@pytest.mark.parametrize("family", [*FAMILIES, *RECURRENT])
def test_rows_of_a_ragged_batch_read_as_they_do_alone(family: str) -> None:
    body, batch = backbone(family), 3
    request = toys.inputs(family, batch=batch, ragged=True)
    together = prefilled(body, request)
    alone = [prefilled(body, toys.alone(request, row)) for row in range(batch)]
    story = Story(batch)
    pending = story.waiting
    for tree in (Tree.chain(3), Tree.chain(2), Tree.chain(4)):
        draft = story.draft(tree)
        logits = read(body, together, pending, draft)
        paths = [list(range(story.random.randint(0, tree.nodes))) for _ in range(batch)]
        for row in range(batch):
            own = Draft.chain(draft.tokens[row : row + 1], Kind.DET)
            single = read(body, alone[row], pending[row : row + 1], own)
            close(logits[row : row + 1], single)
            alone[row].commit([len(pending[row])], [paths[row]], tree.nodes)
        counts = together.commit([len(row) for row in pending], paths, tree.nodes)
        before = [len(row) for row in story.text]
        story.go_on(draft, paths)
        for row, kept in enumerate(counts):  # a recurrent row keeps all or nothing
            read_so_far = before[row] - len(pending[row]) + kept
            pending[row] = story.text[row][read_so_far:]


@pytest.mark.parametrize("family", FAMILIES)
def test_tree_nodes_read_like_the_chains_that_lead_to_them(family: str) -> None:
    body = backbone(family)
    request = toys.inputs(family, batch=2, ragged=True)
    memory, story = prefilled(body, request), Story(2)
    for tree in SHAPES[:3:2]:
        draft = story.draft(tree)
        logits = read(body, memory, story.waiting, draft)
        ancestors = draft.ancestors()[0]
        for node in range(tree.nodes):
            chain = Draft.chain(draft.tokens[:, ancestors[node]], Kind.DET)
            path = read(
                body, memory, story.waiting, chain
            )  # nothing is kept, so it can be read again
            close(path[:, -1], logits[:, node + 1])


def level(tokens: Sequence[Sequence[int]], sees: Sequence[Sequence[int]], depth: int) -> TokenBlock:
    """Nodes of one depth (B, w), read behind those of the levels above; 1 = visible."""
    corner = torch.tensor(sees)[None] == 1  # (1, w, behind + w)
    count = len(sees)
    depths = torch.full((1, count), depth)
    return TokenBlock(torch.tensor(tokens), depths, corner, 0, None, len(sees[0]) - count)


@torch.no_grad()
def test_a_lone_node_behind_other_branches_sees_its_own_only() -> None:
    """Also in a memory that gives a lone token no mask."""
    body, request = backbone("llama"), toys.inputs("llama")
    memory, story = prefilled(body, request), Story(1)
    assert isinstance(memory, Memory)
    memory.is_maskless = True
    read(body, memory, story.waiting, None)
    memory.commit([1], [()], 0)
    other, parent, child = (story.word() for _ in range(3))
    body.read(memory, level([[other, parent]], [[1, 0], [0, 1]], 0))
    logits, _ = body.read(memory, level([[child]], [[0, 1, 1]], 1))
    close(logits[0, 0], fresh(body, request, 0, [*story.text[0], parent, child]))


@torch.no_grad()
def test_levels_that_were_refused_hide_behind_a_row_that_is_ahead() -> None:
    """A deep level leaves columns open that a shorter block does not write again."""
    body, request = backbone("llama"), toys.inputs("llama", batch=2, ragged=True)
    memory, story = prefilled(body, request), Story(2)
    draft = story.draft(Tree.chain(3))
    read(body, memory, story.waiting, draft)
    memory.commit([1, 1], [(0, 1, 2), ()], 3)
    story.go_on(draft, [(0, 1, 2), ()])
    body.read(memory, level([[story.word()], [story.word()]], [[1, 1, 1, 1]], 3))
    logits = read(body, memory, story.waiting, None)
    for row in range(2):
        close(logits[row, 0], fresh(body, request, row, story.text[row]))


@pytest.mark.parametrize("family", RECURRENT)
def test_a_recurrent_state_comes_back_after_a_rejection(family: str) -> None:
    """Accepted tokens stay pending and are read again, with a fresh prefill's distributions."""
    body, request = backbone(family), toys.inputs(family)
    memory, story = prefilled(body, request), Story(1)
    pending = story.waiting[0]
    for accepted in (1, 0, 2, 3, 1, 3, 3):
        draft = story.draft(Tree.chain(3))
        logits = read(body, memory, [pending], draft)
        said = [*story.text[0], *draft.tokens[0, :accepted].tolist()]
        close(logits[0, accepted], fresh(body, request, 0, said))
        kept = memory.commit([len(pending)], [list(range(accepted))], 3)[0]
        assert kept == (len(pending) + 3 if accepted == 3 else 0)
        known = len(story.text[0]) - len(pending) + kept
        story.go_on(draft, [list(range(accepted))])
        pending = story.text[0][known:]


@pytest.mark.parametrize("family", RECURRENT)
def test_a_restored_snapshot_reads_the_same_again(family: str) -> None:
    body, request = backbone(family), toys.inputs(family)
    memory, story = prefilled(body, request), Story(1)
    assert isinstance(memory, Memory)
    assert not memory.cache.can_branch
    saved = memory.cache.snapshot()
    first = read(body, memory, story.waiting, story.draft(Tree.chain(3)))
    spoiled = read(body, memory, story.waiting, None)
    memory.cache.restore(saved)
    again = read(body, memory, story.waiting, None)
    close(again[:, 0], first[:, 0])
    assert not torch.allclose(spoiled, again, atol=1e-3)


@pytest.mark.parametrize("batch", [1, 3])
def test_buffers_grow_by_doubling_and_stay_put_between(batch: int) -> None:
    body = backbone("llama")
    request = toys.inputs("llama", batch=batch, ragged=batch > 1)
    memory, story = prefilled(body, request, room=6), Story(batch)
    assert isinstance(memory, Memory)
    layers = [layer for layer in memory.cache.layers if isinstance(layer, SlotLayer)]
    buffers: list[Any] = [[] for _ in layers]
    capacities, masks = [layers[0].keys.shape[2]], [memory.mask.buffer]
    assert capacities[0] == request["input_ids"].shape[1] + 6
    for turn in range(60):
        tree = SHAPES[turn % 2]
        draft, paths = story.draft(tree), story.paths(tree)
        read(body, memory, story.waiting, draft)
        memory.commit([1] * batch, paths, tree.nodes)
        story.go_on(draft, paths)
        if layers[0].keys.shape[2] != capacities[-1]:
            capacities.append(layers[0].keys.shape[2])
        if memory.mask.buffer is not masks[-1]:
            masks.append(memory.mask.buffer)
        for seen, layer in zip(buffers, layers, strict=True):
            if not seen or seen[-1].data_ptr() != layer.keys.data_ptr():
                seen.append(layer.keys)  # held, so that no address is given out twice
    assert len(capacities) > 2
    assert all(b == 2 * a for a, b in pairwise(capacities))
    assert all(len(seen) <= len(capacities) for seen in buffers)
    assert len(masks) <= 4  # a wider block, more rows, and doublings
    widths = [mask.shape[3] for mask in masks]
    assert all(b == a or b >= 2 * a for a, b in pairwise(widths))


@pytest.mark.parametrize("batch", [1, 3])
def test_buffers_that_grow_when_full_keep_their_last_slot(batch: int) -> None:
    body, room = backbone("llama"), 3
    request = toys.inputs("llama", batch=batch, ragged=batch > 1)
    memory, story = prefilled(body, request, room), Story(batch)
    for step in range(room + 2):
        logits = read(body, memory, story.waiting, None)
        if step >= room:  # grown
            for row in range(batch):
                close(logits[row, 0], fresh(body, request, row, story.text[row]))
        memory.commit([1] * batch, [()] * batch, 0)
        for text in story.text:
            text.append(story.word())


@pytest.mark.parametrize("batch", [1, 3])
def test_nothing_is_allocated_again_where_there_is_room(batch: int) -> None:
    body = backbone("llama")
    request = toys.inputs("llama", batch=batch, ragged=batch > 1)
    memory, story = prefilled(body, request, room=200), Story(batch)
    assert isinstance(memory, Memory)
    addresses = set()
    for turn in range(5):
        tree = SHAPES[turn % 2]
        draft, paths = story.draft(tree), story.paths(tree)
        read(body, memory, story.waiting, draft)
        memory.commit([1] * batch, paths, tree.nodes)
        story.go_on(draft, paths)
        if turn:  # the first block decides how many lines the mask has
            pointers = [layer.keys.data_ptr() for layer in memory.cache.layers]
            addresses.add((memory.mask.buffer.data_ptr(), *pointers))
    assert len(addresses) == 1
    assert memory.cache.bytes() == sum(
        2 * layer.keys.numel() * layer.keys.element_size() for layer in memory.cache.layers
    )


def test_a_window_hides_what_lies_behind_it() -> None:
    """With a text beyond the window, the first tokens have no say left."""
    body = backbone("mistral-sliding")
    story = Story(1, seed=2)
    words = [story.word() for _ in range(3 * toys.WINDOW)]
    other = [story.word(), *words[1:]]
    assert other != words
    logits = []
    for text in (words, other):
        request = {"input_ids": torch.tensor([text[: toys.WINDOW + 4]])}
        memory = prefilled(body, request)
        for token in text[toys.WINDOW + 4 :]:
            logits.append(read(body, memory, [[token]], story.draft(Tree.chain(2))))
            memory.commit([1], [()], 2)
    half = len(logits) // 2
    # three layers of a window of 16 pass on what is up to 48 tokens behind
    close(logits[half - 1][:, 0], logits[-1][:, 0])
    assert not torch.allclose(logits[0][:, 0], logits[half][:, 0], atol=1e-4)


def test_a_row_that_ended_keeps_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last token is read again beside the others, and is never kept."""
    model, request = toys.model("llama"), toys.inputs("llama", batch=2)
    said = model.generate(**request, max_new_tokens=12, do_sample=False)[:, -12:].tolist()
    seen: list[tuple[tuple[bool, ...], list[int]]] = []
    keep = CausalTarget.keep

    def noted(self: CausalTarget, *given: Any) -> Context:
        context = keep(self, *given)
        seen.append((context.finished, list(context.memory.lengths)))
        return context

    monkeypatch.setattr(CausalTarget, "keep", noted)
    end = next(token for token in said[0][2:5] if token not in said[1])
    fast = mmspec.accelerate(model, "coupled", drafter=Oracle(said, 0.5, tree=2, seed=1))
    fast.generate(**request, max_new_tokens=12, do_sample=False, eos_token_id=end)
    ended = [kept[0] for finished, kept in seen if finished[0]]
    assert len(ended) > 1
    assert len(set(ended)) == 1
