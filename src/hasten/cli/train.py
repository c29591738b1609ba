"""`hasten train RECIPE --key value ...`: pretrain, or finetune with --init."""

import json
import os
import sys
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import tyro

from hasten.cli.options import JsonOption
from hasten.cli.parsing import merge_repeated
from hasten.cli.train_help import first_screen, recipes_screen
from hasten.distributed import launched
from hasten.effects import Facts, Needs, Unless, facts_of, given_options, refuse_ignored
from hasten.training.recipe import Recipe
from hasten.training.recipes import DESCRIPTIONS, RECIPES, as_asked

TRAINS = Unless("print_config")


@dataclass(frozen=True, kw_only=True)
class Train(JsonOption):
    """Train a language model, from scratch or from a checkpoint (--init), and write a Hugging Face folder.

    Everything is written to runs/NAME: model/, train.jsonl (a line a step), loss.png, checkpoints/. Ctrl-C saves and
    ends the run; the same command continues it.
    """

    # An empty name takes the word "recipe" out of every flag: --optimizer.learning-rate, not --recipe.optimizer....
    recipe: Annotated[Recipe, tyro.conf.arg(name="")]
    resume: Annotated[Literal["auto", "never", "must"], TRAINS] = "auto"
    """auto: continue from the run's last checkpoint, if there is one; never: start over; must: require a checkpoint."""
    print_config: bool = False
    """Print the recipe as JSON and exit."""
    processes: Annotated[int, TRAINS] = 0
    """Train in N processes on this machine, divided as the --parallel options say (0: in this process)."""
    max_restarts: Annotated[int, TRAINS, Needs("processes")] = 0
    """With --processes: how often to restart all of them after one has died."""
    devices: Annotated[Literal["given", "auto"], TRAINS] = "given"
    """given: as the options say; auto: a plan for this machine chooses processes, ZeRO stage, offload, policy,
    recomputation and micro-batches, but for those that are given."""
    progress: Annotated[bool, TRAINS] = True
    """Show the progress on standard error: a bar, or a line about every 30 seconds if it is not a terminal."""

    def facts(self) -> Facts:
        """Facts that conditions of options depend on, besides other options."""
        return facts_of(self.recipe.run.device)

    def run(self) -> None:
        """Train, and print a summary; with --print-config print the recipe."""
        if self.print_config:
            if self.write(self.recipe.to_json()):
                print(json.dumps(self.recipe.to_json(), indent=2))
            return

        from hasten.training.session import train

        result = train(self.recipe, progress=self.progress, resume=self.resume)
        if launched() and os.environ["RANK"] != "0":  # rank 0 reports
            raise SystemExit(0 if result.stopped_by is None else 128 + result.stopped_by)
        for_people = self.write(result.to_json())
        if result.stopped_by is not None:
            print(
                f"stopped after step {result.steps}, saved in {result.folder}: the same command continues from there",
                file=sys.stderr,
            )
            raise SystemExit(128 + result.stopped_by)
        if for_people:
            print(summary(result))

    @staticmethod
    def main(argv: list[str]) -> None:
        """Parse the arguments after `hasten train` and run; a recipe's --help is one screen, --help-all everything."""
        if {"-h", "--help"} & set(argv):
            recipe = next((RECIPES[word] for word in argv[:1] if word in RECIPES), None)
            print(recipes_screen() if recipe is None else first_screen(recipe))
            return
        argv = ["--help" if argument == "--help-all" else argument for argument in argv]
        argv = merge_repeated(argv, Recipe)
        command: Train = tyro.cli(
            command_type(),
            prog="hasten train",
            description="Train a recipe. `hasten train RECIPE --help` shows the usual options, `--help-all` all.",
            args=argv,
        )
        refuse_ignored(command, argv, usual=Train(recipe=RECIPES[argv[0]]))
        given = given_options(argv, Recipe)
        command = replace(command, recipe=as_asked(command.recipe, given))
        if command.devices == "auto":
            from hasten.cli.planned import training_by_plan

            Train.main(training_by_plan(command, argv, given))
            return
        if command.processes and not command.print_config and not launched():
            from hasten.distributed.launch import start

            command.recipe.check()  # once, before every process does it
            start(["train", *argv], processes=command.processes, max_restarts=command.max_restarts)
        else:
            command.run()


def summary(result: Any) -> str:
    """Summarize a finished run in two lines for people."""
    parts = [f"{result.steps:,} steps, {result.tokens:,} tokens in {result.seconds / 60:.1f} minutes"]
    known = (
        ("{:,.0f} tokens/s", result.tokens_per_second),
        ("MFU {:.0%}", result.mfu),
        ("loss {:.3f}", result.loss),
        (f"validation {{:.3f}} (step {result.best_step})", result.best_validation_loss),
    )
    parts += [text.format(value) for text, value in known if value is not None]
    bits = "" if result.bits_per_weight is None else f", {result.bits_per_weight:.2f} bits a weight as stored"
    return f"{', '.join(parts)}\nmodel: {result.model_folder}{bits}"


def command_type() -> Any:
    """The command's type for tyro: one subcommand for each recipe, whose fields are the flags."""
    return tyro.extras.subcommand_type_from_defaults(
        {name: Train(recipe=recipe) for name, recipe in RECIPES.items()}, descriptions=DESCRIPTIONS, prefix_names=False
    )
