"""Ladders: every technique, cumulative, measured beside the machine's limits, reported and drawn."""
