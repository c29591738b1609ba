"""Predictions before a run: bytes, FLOPs and the speeds they allow."""
