"""What a CUDA graph does, on a CPU."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recording(TorchDispatchMode):
    """What a CUDA graph does, on a CPU: tensor operations are noted, and later run again on the same memory.

    No Python of the model runs again: a length that the host counts, a tensor it makes anew, would stay as recorded.
    """

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, result))
        return result

    def replay(self):
        for function, args, kwargs, result in self.calls:
            fresh = function(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(fresh), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)  # a graph writes where it wrote before


class Capturer:
    """Stands in for cuda_graph, warm-up included, and counts."""

    def __init__(self):
        self.recordings = []

    def __call__(self, step, reset, **_):
        for _ in range(3):
            reset()
            step()
        reset()  # a real capture runs nothing
        recording = Recording()
        with recording:
            step()
        self.recordings.append(recording)
        return recording.replay
