"""PipeInfer: a small model drafts on without waiting for the target, up to several windows ahead.

Butler et al. 2024, "PipeInfer: accelerating LLM inference using asynchronous pipelined
speculation". As `pearl`, but neither side waits for a window: the target verifies the tokens that
are ready, at most `length`, while up to `ahead` windows are drafted, and a draft that is refused is
dropped at its next token (early cancellation). Helps where both run in parallel and the ratio of
their times changes. Exact. With a rule that draws anew (`verifier="rejection"`) a seed does not
reproduce the sampled tokens, because how much is drafted depends on the time it took. Differs from
the paper, whose target is a pipeline of machines with several unverified blocks in flight: here one
block is in the target, which is AMUSD (McDanel 2024), and `mmspec bench schedules` computes what
stages add. Where the draft model is not in a thread (two accelerators), one window is drafted
ahead, as by `pearl`.
"""

from mmspec.drafters.neural.pipelined import with_pipelined_windows
from mmspec.verifiers.coupled import Coupled

RECIPE = with_pipelined_windows(
    8,
    Coupled(),
    refill=0,
    ahead=3,
    optimisation="drafts on while the target verifies; cancelled when refused",
    paper="Butler et al. 2024",
    reconstructed="one block in the target at a time; blocks of what is ready",
)
