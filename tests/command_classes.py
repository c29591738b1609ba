"""The class that each command's options are fields of, by the command's name as it is typed."""

from importlib import import_module

from hasten.cli.bench import LADDERS
from hasten.cli.explain import ExplainModel
from hasten.cli.explain_attention import ExplainAttention
from hasten.cli.main import COMMANDS
from hasten.cli.profile import ProfileModel

# The classes whose options have no prefixes; those of the other commands are found by their names.
FLAT = {"explain": ExplainModel, "explain attention": ExplainAttention}
FLAT |= {f"profile {use}": ProfileModel for use in ("generate", "serve")}
FLAT |= {f"bench {name}": kind for name, kind in LADDERS.items()}
KINDS = {name: getattr(import_module(module), kind) for name, (module, kind, _) in COMMANDS.items() if "." not in kind}
KINDS = {name: kind for name, kind in KINDS.items() if isinstance(kind, type)} | FLAT
