"""`hasten train --help` lists the recipes; `hasten train RECIPE --help` is what people use, with its values."""

import dataclasses
import textwrap

from hasten.training.recipe import Recipe, flat
from hasten.training.recipes import DESCRIPTIONS

# flag -> (field of the recipe, None for the command's own options; help)
USUAL: dict[str, tuple[str | None, str]] = {
    "--minutes": ("run.minutes", "approximate duration"),
    "--steps": ("run.steps", "number of steps, instead of minutes"),
    "--name": ("name", "name of the run: its folder is runs/NAME"),
    "--init": ("init", "model folder or hub id to finetune"),
    "--data.source": ("data.source", "file, folder, glob or hf:owner/name"),
    "--data.batch-size": ("data.batch_size", "rows in memory at once"),
    "--optimizer.learning-rate": ("optimizer.learning_rate", "peak learning rate"),
    "--techniques.precision": ("techniques.precision", "dtype of the matrix products"),
    "--resume": (None, "auto continues the run; never starts over"),
}
COMMANDS_OWN = {"--resume": "auto"}
WIDTH = 80


def recipes_screen() -> str:
    """The help of the command without a recipe: what there is to choose from."""
    lines = ["usage: hasten train RECIPE [--option value ...]      (RECIPE --help for its options)", ""]
    lines += ["Pretrain a language model, or go on training one (--init). The recipes:", ""]
    return "\n".join([*lines, *(f"  {name:<18}{text}" for name, text in DESCRIPTIONS.items())])


def first_screen(recipe: Recipe) -> str:
    """The help of a recipe in one screen of 80 columns; `--help-all` explains every field."""
    values = flat(recipe)
    lines = [f"usage: hasten train {recipe.name} [--option value ...]"]
    lines += ["", *textwrap.wrap(DESCRIPTIONS[recipe.name], WIDTH), ""]
    for flag, (field, text) in USUAL.items():
        value = COMMANDS_OWN[flag] if field is None else values[field]
        lines.append(f"  {flag + ' ' + ('-' if value is None else str(value)):<33} {text}")
    lines += ["", f"and more (hasten train {recipe.name} --help-all explains them all):"]
    shown = {field for field, _ in USUAL.values()}
    for group in (field.name for field in dataclasses.fields(recipe)):
        rest = [name.partition(".")[2] for name in values if name.startswith(f"{group}.") and name not in shown]
        if rest:
            lines.append(f"  --{group + '.':<13}{_as_many_as_fit([name.replace('_', '-') for name in rest])}")
    return "\n".join(lines)


def _as_many_as_fit(names: list[str], room: int = WIDTH - 17) -> str:
    """The names on one line of `room` characters, with dots for those that do not fit."""
    text = ", ".join(names)
    return text if len(text) <= room else f"{text[: text.rindex(', ', 0, room - 3)]}, ..."
