"""Verifiers: what becomes of a draft once the target has scored it. One rule or walk per file."""
