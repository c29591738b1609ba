"""Mamba-2's state space duality (arXiv 2405.21060): a matrix a head that each token decays, adds to and reads.

`recurrent_scan` goes token by token and is the reference; `chunked_scan` computes the same in matrix products.
"""

from hasten.ops.ssd.scan import CHUNK, chunked_scan, recurrent_scan, scan

__all__ = ["CHUNK", "chunked_scan", "recurrent_scan", "scan"]
