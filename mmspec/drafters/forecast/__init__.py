"""Forecasting the features of a denoising network instead of computing them: lossy, no training.

`forecast` extrapolates features, `features` finds them in a network, `hooks` attaches forecasting
to a diffusers network for one sampling call.
"""
