"""Token-only drafters of mmspec as proposers of vLLM.

LLM(
    model=folder,
    speculative_config={
        "method": "custom_class",
        "model": "mmspec_vllm.PromptLookupProposer",
        "num_speculative_tokens": 8,
    },
    additional_config={"mmspec": {"longest": 4}},
)
"""

from mmspec_vllm.proposers import (
    PromptLookupProposer,
    RetrievalProposer,
    SuffixAutomatonProposer,
    TokenRecyclingProposer,
)

__all__ = [
    "PromptLookupProposer",
    "RetrievalProposer",
    "SuffixAutomatonProposer",
    "TokenRecyclingProposer",
]
