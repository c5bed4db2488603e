"""Tokens per second of a target split over processes on this machine, over one process.

python -m tools.split_throughput --shape small --processes 2 --tokens 64

Tensor parallelism of transformers (`tp_plan="auto"`) by gloo on CPUs, one thread a process. Plain
decoding, and a chain of 5 tokens of which an oracle has each right with probability 0.8: blocks
share the cost of an exchange between processes. Every process has to decode the same tokens; how
many of them are those of one process is printed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

import mmspec
from mmspec.bench.studies.shapes import build_model, random_prompt
from mmspec.drafters.oracle import Oracle
from mmspec.models.loading import load_causal
from mmspec.training.sharding import check_sharded, sharding_options

LAUNCH = ("-m", "torch.distributed.run", "--standalone")
LENGTH, ACCEPTANCE, PROMPT = 5, 0.8, 64


def measure(folder: str, processes: int, count: int) -> dict[str, Any]:
    """Tokens per second by method ("rates") and the "tokens", in each of the processes."""
    from accelerate import PartialState

    state = PartialState(cpu=True)
    torch.set_num_threads(1)
    model = load_causal(folder, **(sharding_options(processes) if processes > 1 else {}))
    if processes > 1:
        check_sharded(model, processes)
    prompt = random_prompt(model.config.vocab_size, PROMPT, torch.device("cpu"))
    inputs = {**prompt, "max_new_tokens": count, "do_sample": False}
    plain = mmspec.accelerate(model, "plain")
    out, seconds = _time(plain, inputs)
    tokens = out.sequences[:, -count:].tolist()
    oracle = Oracle(tokens, 1 - ACCEPTANCE, LENGTH)
    drafted, other = _time(mmspec.accelerate(model, "plain", drafter=oracle), inputs)
    if not torch.equal(drafted.sequences, out.sequences):
        raise RuntimeError("a draft changed the tokens")
    if processes > 1:
        both = [torch.empty_like(out.sequences) for _ in range(processes)]
        dist.all_gather(both, out.sequences.contiguous())
        if any(not torch.equal(one, both[0]) for one in both):
            raise RuntimeError("the processes decoded different tokens")
        dist.barrier()
        state.destroy_process_group()
    rates = {"plain": count / seconds, f"chain of {LENGTH}": count / other}
    return {"rates": rates, "tokens": tokens[0]}


def _time(fast: Any, inputs: dict[str, Any]) -> tuple[Any, float]:
    """The output and the seconds of a call, after one that is not timed."""
    fast.generate(**{**inputs, "max_new_tokens": 4})
    start = perf_counter()
    out = fast.generate(**inputs)
    return out, perf_counter() - start


def launch(folder: str, processes: int, count: int) -> dict[str, Any]:
    """The figures of the first of so many processes. Raises RuntimeError where one fails."""
    own = ("-m", "tools.split_throughput", "--folder", folder, "--tokens", str(count))
    command = [sys.executable, *LAUNCH, f"--nproc-per-node={processes}", *own]
    command += ["--processes", str(processes)]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(lines) != processes:
        raise RuntimeError(f"{processes} processes failed:\n{done.stdout}{done.stderr}")
    found: dict[str, Any] = json.loads(lines[0])
    return found


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="small")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--folder")  # of a process that `launch` started
    options = parser.parse_args(given)
    if options.folder is not None:
        found = measure(options.folder, options.processes, options.tokens)
        sys.stdout.write(json.dumps(found) + "\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        model = build_model(options.shape, torch.device("cpu"), torch.float32)
        model.save_pretrained(folder)
        one, several = (launch(folder, n, options.tokens) for n in (1, options.processes))
    for method, rate in one["rates"].items():
        other = several["rates"][method]
        sys.stdout.write(
            f"{options.shape}, {method}: {rate:.1f} tokens/s, {other:.1f} by "
            f"{options.processes} processes ({other / rate:.2f}x)\n"
        )
    pairs = zip(one["tokens"], several["tokens"], strict=True)
    same = next((at for at, (a, b) in enumerate(pairs) if a != b), options.tokens)
    sys.stdout.write(f"the first {same} of {options.tokens} tokens are those of one process\n")


if __name__ == "__main__":
    main()
