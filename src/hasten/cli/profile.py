"""`hasten profile train RECIPE` and `hasten profile generate|serve MODEL`: show where time and memory go."""

import inspect
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

from hasten.cli.explain import print_kernels
from hasten.cli.help import first_screen, for_parser, wants_help
from hasten.cli.options import LoadOptions
from hasten.cli.parsing import parse
from hasten.distributed import launched
from hasten.effects import Facts, Reads, facts_of, refuse_ignored
from hasten.errors import ConfigError
from hasten.training.recipe import Recipe
from hasten.training.recipes import DESCRIPTIONS, RECIPES

# Fields of a recipe without effect here: its length, its results, and techniques that hide the parts of a step.
NOT_PROFILED = (
    *(f"run.{name}" for name in ("steps", "epochs", "minutes", "validate_every", "validation_batches")),
    *(
        f"run.{name}"
        for name in ("checkpoint_every", "background_checkpoints", "export", "export_dtype", "tensorboard")
    ),
    *(f"techniques.{name}" for name in ("whole_model", "compile_whole", "capture")),
)


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """How to measure, and where to write the result.

    Args:
        measured: Measured steps of each kind; as many run without measuring.
        sort: Show all parts in order (tree), or only the leaves: most time above the machine's limit first (gain), or
            most time first.
        tensorboard: Also write the times as TensorBoard scalars (needs the package tensorboard).
        output: The folder to write; by default runs/NAME/profile for a recipe, profile-USE here for a model.
    """

    measured: int = 8
    sort: Literal["tree", "gain", "time"] = "tree"
    tensorboard: bool = False
    output: Path | None = None

    def measure(self, subject: Any, folder: Path, **settings: Any) -> None:
        """Measure, write the result, and print it with the kernels."""
        from hasten.profiling.profile import profile
        from hasten.profiling.show import show

        folder = self.output or folder
        found = profile(subject, folder, steps=self.measured, tensorboard=self.tensorboard, **settings)
        if launched() and os.environ["RANK"] != "0":  # rank 0 reports
            return
        show(found, sort=self.sort)
        print_kernels(found.kernels)


@dataclass(frozen=True, kw_only=True)
class ProfileTraining(ProfileOptions):
    """Measure a recipe's training step; nothing is trained, and the run's folder is left as it is."""

    recipe: Annotated[Recipe, tyro.conf.arg(name="")]
    processes: int = 0
    """Profile N processes on this machine together, divided as the --parallel options say (0: this process alone)."""

    EFFECTS: ClassVar = dict.fromkeys(NOT_PROFILED, Reads(by="a profile, which takes --measured steps"))

    def facts(self) -> Facts:
        """Facts that conditions of options depend on."""
        return facts_of(self.recipe.run.device)

    def run(self) -> None:
        self.measure(self.recipe, Path(self.recipe.run.folder).expanduser() / self.recipe.name / "profile")


@dataclass(frozen=True, kw_only=True)
class ProfileModel(ProfileOptions, LoadOptions):
    """Measure how a model reads prompts and appends tokens to them.

    Args:
        batch: Prompts that are processed together.
        prompt_tokens: Random tokens of each prompt; fewer if the model has no room for an answer.
    """

    batch: int = 1
    prompt_tokens: int = 512


def profile(arguments: list[str]) -> None:
    """usage: hasten profile train RECIPE [options]
           hasten profile generate MODEL [options]
           hasten profile serve MODEL [options]

    Where the time and the memory of a step go, which kernels run and why, and what could be gained: tables,
    profile.json, profile.png, a trace for ui.perfetto.dev. `hasten profile USE --help` for the options of each.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(inspect.cleandoc(str(profile.__doc__)))
        return
    use, *rest = arguments
    if use not in ("train", "generate", "serve"):
        raise ConfigError(f"hasten profile measures train, generate or serve; found {use!r}")
    if use == "train":
        recipes = {name: ProfileTraining(recipe=recipe) for name, recipe in RECIPES.items()}
        kinds = tyro.extras.subcommand_type_from_defaults(recipes, descriptions=DESCRIPTIONS, prefix_names=False)
        if wants_help(rest) and rest[0] in RECIPES:
            print(first_screen(ProfileTraining, prog="hasten profile train RECIPE"))
            return
        made: Any = tyro.cli(
            kinds, args=for_parser(rest), prog="hasten profile train", description=ProfileTraining.__doc__
        )
        refuse_ignored(made, rest, usual=ProfileTraining(recipe=RECIPES[rest[0]]))
        if made.processes and not launched():
            from hasten.distributed.launch import start

            made.recipe.check()  # once, before every process does it
            start(["profile", *arguments], processes=made.processes, resumes=False)
        else:
            made.run()
        return
    summary = str(ProfileModel.__doc__).partition("\n")[0]
    command = parse(ProfileModel, rest, prog=f"hasten profile {use}", description=summary)
    sizes = {"batch": command.batch, "prompt_tokens": command.prompt_tokens}
    command.measure(command.load(), Path(f"profile-{use}"), use=use, **sizes)
