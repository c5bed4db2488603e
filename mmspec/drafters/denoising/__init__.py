"""Drafts of denoising chains."""
