"""Traces: a record of every round of a request, as a JSONL file and as a page to look at."""
