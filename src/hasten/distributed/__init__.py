"""Several processes with one model: training (docs/distributed.md) and inference (docs/parallel-inference.md)."""
