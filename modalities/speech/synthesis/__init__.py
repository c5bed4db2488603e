"""Speech synthesis by language models whose vocabulary includes the codes of one codebook."""
