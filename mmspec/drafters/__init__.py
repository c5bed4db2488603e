"""Where drafts come from, one source per file."""

from mmspec.drafters.oracle import Oracle, Random
from mmspec.drafters.prompt_lookup import PromptLookup
from mmspec.drafters.suffix import SuffixAutomaton
from mmspec.drafters.token_recycling import TokenRecycling

__all__ = ["Oracle", "PromptLookup", "Random", "SuffixAutomaton", "TokenRecycling"]
