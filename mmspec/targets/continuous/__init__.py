"""Targets of continuous tokens: denoising chains and image patches."""
