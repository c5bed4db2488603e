"""Run requests in vLLM, one after the other and all at once. Runs in vLLM's environment.

    python tools/vllm_engine.py jobs.json results.json

The files hold lists of `Job` and `Result`. Neither this package nor its other dependencies are
needed (see `tools/vllm_env.sh`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NotRequired, TypedDict

SETTINGS = {  # one process and thread on the CPU, a cache of 1 GiB, no network
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class Request(TypedDict):
    """A formatted prompt and, where the target reads one, the file of an image."""

    prompt: str
    image: str | None


class Job(TypedDict):
    """Greedy requests to a target, with the head of `head` or without speculation."""

    model: str
    head: str | None
    length: int  # drafted tokens
    max_tokens: int
    method: NotRequired[str]  # of the head in vLLM; default: eagle3
    is_mended: NotRequired[bool]  # see `address_slots_by_index` and `norm_keys_by_layer`
    requests: list[Request]


class Row(TypedDict):
    """Tokens of a request, and how many new ones each forward of the target gave."""

    prompt: list[int]
    tokens: list[int]
    steps: list[int]


class Result(TypedDict):
    """Rows of single requests, tokens of one batch, and vLLM's counters of the single ones."""

    version: str
    rows: list[Row]
    batch: list[list[int]]
    drafts: int
    accepted_per_position: list[int]


def main(jobs: Path, results: Path) -> None:
    """Run the jobs of a file, and write their results."""
    os.environ.update(SETTINGS)
    work: list[Job] = json.loads(jobs.read_text(encoding="utf-8"))
    results.write_text(json.dumps([serve(one) for one in work]), encoding="utf-8")


def serve(job: Job) -> Result:
    """Load the target and its head as they lie, and run the requests."""
    import vllm
    from vllm.distributed import cleanup_dist_env_and_memory

    with ExitStack() as stack:
        if job.get("is_mended"):
            stack.enter_context(address_slots_by_index())
            stack.enter_context(norm_keys_by_layer())
        stack.callback(cleanup_dist_env_and_memory)
        return _serve(vllm, job)


def _serve(vllm: Any, job: Job) -> Result:
    method = job.get("method", "eagle3")
    head = {"method": method, "model": job["head"], "num_speculative_tokens": job["length"]}
    engine = vllm.LLM(
        model=job["model"],
        speculative_config=head if job["head"] else None,
        dtype="float32",
        max_model_len=512,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
    )
    sampling = vllm.SamplingParams(temperature=0, max_tokens=job["max_tokens"])
    prompts = [_read(one) for one in job["requests"]]
    rows = [_run(engine.llm_engine, str(at), one, sampling) for at, one in enumerate(prompts)]
    counters = {one.name.removeprefix("vllm:spec_decode_"): one for one in engine.get_metrics()}
    drafts, accepted = (
        counters.get(name) for name in ("num_drafts", "num_accepted_tokens_per_pos")
    )
    batch = engine.generate(prompts, sampling, use_tqdm=False)
    engine.llm_engine.engine_core.shutdown()
    return {
        "version": vllm.__version__,
        "rows": rows,
        "batch": [list(one.outputs[0].token_ids) for one in batch],
        "drafts": drafts.value if drafts else 0,
        "accepted_per_position": list(accepted.values) if accepted else [],
    }


def _read(request: Request) -> Any:
    from PIL import Image

    if request["image"] is None:
        return {"prompt": request["prompt"]}
    image = Image.open(request["image"]).convert("RGB")
    return {"prompt": request["prompt"], "multi_modal_data": {"image": image}}


def _run(engine: Any, name: str, prompt: Any, sampling: Any) -> Row:
    """Run one request alone, forward by forward."""
    engine.add_request(name, prompt, sampling)
    steps: list[int] = []
    found: Any = None
    while engine.has_unfinished_requests():
        for found in engine.step():
            steps.append(len(found.outputs[0].token_ids) - sum(steps))
    tokens = list(found.outputs[0].token_ids)
    return {"prompt": list(found.prompt_token_ids), "tokens": tokens, "steps": steps}


@contextmanager
def address_slots_by_index() -> Iterator[None]:
    """Make the drafter write keys and values at the index of a token.

    With M-RoPE, vLLM 0.32 writes those of drafted tokens at their rotary position, which is smaller
    after an image, over those of the prompt (its issue 54498). Positions stay as they are.
    """
    from vllm.v1.spec_decode import llm_base_proposer as proposer

    update = proposer.eagle_step_update_slot_mapping_and_metadata

    def update_by_index(*, positions_1d: Any, seq_lens: Any, **given: Any) -> None:
        positions, rows = positions_1d + 1, len(positions_1d)
        update(positions_1d=(seq_lens[:rows] - 1).to(positions_1d), seq_lens=seq_lens, **given)
        given["out_clamped_positions"].copy_(positions)

    proposer.eagle_step_update_slot_mapping_and_metadata = update_by_index
    try:
        yield
    finally:
        proposer.eagle_step_update_slot_mapping_and_metadata = update


@contextmanager
def norm_keys_by_layer() -> Iterator[None]:
    """Norm the keys of a DFlash context by the weights of their own layer.

    vLLM 0.32 gives one kernel the weights of all layers, and that of the CPU reads those of the
    first one only.
    """
    from vllm import _custom_ops as ops
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model as Model

    whole = Model._normalize_context_k

    def norm(self: Any, keys: Any) -> Any:  # (layers, n, heads, width)
        found = keys.new_empty(keys.shape)
        for own, given, weight in zip(found, keys, self._k_norm_weights, strict=True):
            ops.rms_norm(own, given, weight, self._rms_norm_eps)
        return found

    Model._normalize_context_k = norm
    try:
        yield
    finally:
        Model._normalize_context_k = whole


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
