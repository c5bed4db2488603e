"""Speed past these machines: a cost model, its calibration, plans and simulated requests."""
