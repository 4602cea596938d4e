"""Fitting what decodes: the drafter here, the edge scorer and the budget policy beside it. Plain torch, no cluster."""
