"""Denoising chains with a known answer: mixtures of Gaussians, whose best denoiser is a formula."""

from mmspec.modalities.diffusion.mixture import ExactDenoiser, Mixture, mixture, vp_grid

__all__ = ["ExactDenoiser", "Mixture", "mixture", "vp_grid"]
