"""The ranks of a training run as a mesh."""

from functools import lru_cache
from typing import TYPE_CHECKING

from hasten.distributed.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

TENSOR = "tensor"  # the mesh's innermost dimension: neighbours, which exchange most


@lru_cache  # the styles and FSDP2 want submeshes of one mesh
def mesh_of(kind: str, ranks: Ranks, replicas: int) -> "DeviceMesh":
    """The ranks as replicas of shards of `ranks.tensor`; dimensions of one are left out, but for the shards."""
    from torch.distributed.device_mesh import init_device_mesh

    sizes = {"replicas": replicas, "shard": ranks.readers // replicas, TENSOR: ranks.tensor}
    kept = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    return init_device_mesh(kind, tuple(kept.values()), mesh_dim_names=tuple(kept))
