"""The device mesh of a training run's ranks."""

from functools import lru_cache
from typing import TYPE_CHECKING

from hasten.distributed.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

TENSOR = "tensor"  # the innermost dimension: neighbours, which exchange most


@lru_cache  # tensor parallelism and FSDP2 need submeshes of one mesh
def mesh_of(kind: str, ranks: Ranks, replicas: int) -> "DeviceMesh":
    """Create the mesh (replicas, shard, tensor) of the ranks; dimensions of size 1, except `shard`, are left out."""
    from torch.distributed.device_mesh import init_device_mesh

    sizes = {"replicas": replicas, "shard": ranks.readers // replicas, TENSOR: ranks.tensor}
    kept = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    return init_device_mesh(kind, tuple(kept.values()), mesh_dim_names=tuple(kept))


@lru_cache
def expert_groups(kind: str, ranks: Ranks, degree: int) -> tuple["ProcessGroup", "ProcessGroup | None"]:
    """This rank's group of `degree` neighbours that divide experts, and that of ranks which have the same ones.

    The second is None where no other rank has them.
    """
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(kind, (ranks.size // degree, degree), mesh_dim_names=("same", "experts"))
    return mesh.get_group("experts"), mesh.get_group("same") if ranks.size > degree else None
