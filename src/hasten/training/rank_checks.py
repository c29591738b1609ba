"""Checks that ranks can train a recipe, and divide its model."""

from hasten.distributed.expert_parallel import check_experts
from hasten.distributed.ranks import Ranks
from hasten.distributed.tensor_training import check_split
from hasten.errors import ConfigError
from hasten.model.config import ModelConfig
from hasten.training.recipe import Parallel, Recipe


def check_ranks(recipe: Recipe, ranks: Ranks) -> None:
    """Raise ConfigError if these ranks cannot train the recipe, before anything is read or created."""
    zero, replicas = recipe.parallel.zero, recipe.parallel.replicas
    if zero and not ranks.joined:
        raise ConfigError(
            f"parallel.zero {zero} is for several processes: start them with torchrun or --processes (1 is enough)"
        )
    if ranks.readers % replicas:
        raise ConfigError(f"parallel.replicas is {replicas}, which {ranks.readers} processes cannot share evenly")
    if ranks.size % recipe.parallel.experts:
        raise ConfigError(
            f"parallel.experts is {recipe.parallel.experts}, which does not divide the number of processes "
            f"({ranks.size}); start a multiple of it with torchrun or --processes"
        )
    if not recipe.run.fit:
        ranks.rows(recipe.data.batch_size)


def check_shares(config: ModelConfig, parallel: Parallel) -> None:
    """Raise ConfigError for a model that cannot be divided among ranks this way."""
    if parallel.tensor > 1:
        check_split(config, parallel.tensor)
    if parallel.experts > 1:
        check_experts(config, parallel.experts)
    # FSDP2 shards what is trained in a block together, in one dtype.
    if parallel.zero and parallel.policy == "float32-masters" and config.expert_choice_bias:
        raise ConfigError(
            f"a {config.family} chooses experts by a bias in float32, beside which parallel.zero does not shard 16-bit "
            "weights; set parallel.policy float32-weights"
        )
