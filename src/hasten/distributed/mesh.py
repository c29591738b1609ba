"""The device mesh of a training run's ranks."""

from functools import lru_cache
from typing import TYPE_CHECKING

from hasten.distributed.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

TENSOR = "tensor"  # the innermost dimension: neighbours, which exchange most


@lru_cache  # tensor parallelism and FSDP2 need submeshes of one mesh
def mesh_of(kind: str, ranks: Ranks, replicas: int) -> "DeviceMesh":
    """Create the mesh (replicas, shard, tensor) of the ranks; dimensions of size 1, except `shard`, are left out."""
    from torch.distributed.device_mesh import init_device_mesh

    sizes = {"replicas": replicas, "shard": ranks.readers // replicas, TENSOR: ranks.tensor}
    kept = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    return init_device_mesh(kind, tuple(kept.values()), mesh_dim_names=tuple(kept))
