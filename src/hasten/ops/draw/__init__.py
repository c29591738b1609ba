"""The draw of a token from its scores."""

from hasten.ops.draw.operator import (
    draw,
    draw_at_once,
    exponential_noise,
    largest,
    least_kept,
    likeliest,
    reference_draw,
)

__all__ = ["draw", "draw_at_once", "exponential_noise", "largest", "least_kept", "likeliest", "reference_draw"]
