"""Forecasting the features of a denoising network instead of computing them: lossy, no training.

`forecast` extrapolates, `gate` says when, `metric` how far off a forecast is, `hooks` puts it all
onto a diffusers network for one sampling call.
"""
