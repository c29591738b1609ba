"""Operators: each has one slow, obviously right reference, its fast kernels, and a picker that says why it chose."""
