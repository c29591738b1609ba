"""The recipes that come with hasten. Importing this does not import torch."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from hasten.training.recipe import Data, Optimizer, OptimizerName, Recipe, Run, Schedule, Shape, Techniques

INIT_MISSING = "MODEL"  # in recipes that need --init
MOST_WARMUP = 0.1  # largest share of the warm-up in a run that is shorter than the recipe's
LIMITS = ("steps", "epochs", "minutes")  # fields of `Run` that end it

# About 10 M parameters for a few minutes on two cores: a million tokens or so, far too few to fill it. So: wide and
# shallow (few large matrix products run faster, and learn no worse at this length), small steps (their number counts
# more than their size), and half the learning rate that longer runs of this size take.
DEMO = Recipe(
    name="demo",
    model=Shape(layers=3, hidden_size=512, heads=8, feed_forward=1152),
    data=Data(source="stdlib", vocab_size=4096, context=256, batch_size=2),
    optimizer=Optimizer(learning_rate=8e-4),
    schedule=Schedule(kind="wsd", warmup_steps=30, warmup_share=MOST_WARMUP, final_fraction=0.0, decay_fraction=0.4),
    run=Run(minutes=3.5, validate_every=250, validation_batches=40, checkpoint_every=250),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model, its optimizer, and the number of tokens after which it beats a bigram model."""

    model: Shape
    optimizer: OptimizerName = "adamw"
    learning_rate: float
    tokens: int

    def of(self, recipe: Recipe) -> Recipe:
        """The recipe with this model and optimizer."""
        return replace(
            recipe,
            model=self.model,
            optimizer=replace(recipe.optimizer, kind=self.optimizer, learning_rate=self.learning_rate),
        )


# Sizes for `hasten demo`, chosen by the speed of the machine. tokens: for a loss below a bigram model's 4.64. Measured:
# width 128 has 4.69 after 500,000 (AdamW 4.97), the planned model 4.09 after 1.4 million; the rest is read off the
# curves. Muon needs little more than half of AdamW's tokens; its iterations cost little in the narrow models.
DEMO_SIZES = (
    Size(model=DEMO.model, learning_rate=8e-4, tokens=800_000),
    Size(
        model=Shape(layers=3, hidden_size=256, heads=4, feed_forward=704),
        optimizer="muon",
        learning_rate=2e-3,
        tokens=650_000,
    ),
    Size(
        model=Shape(layers=4, hidden_size=128, heads=4, feed_forward=384),
        optimizer="muon",
        learning_rate=3e-3,
        tokens=650_000,
    ),
)

# A model that quantization can degrade: it is trained for hours, so that its weights hold much. All widths are
# multiples of 256, the blocks of GGUF's k-quants. Two hours on two idle cores.
CODE = Recipe(
    name="code-25m",
    model=Shape(layers=6, hidden_size=512, heads=8, feed_forward=1536),
    data=Data(source="packages", vocab_size=8192, context=512, batch_size=8),
    optimizer=Optimizer(kind="muon", learning_rate=1e-3),
    schedule=Schedule(kind="wsd", warmup_steps=100, warmup_share=MOST_WARMUP, final_fraction=0.0, decay_fraction=0.3),
    run=Run(steps=1500, validate_every=500, validation_batches=40, checkpoint_every=500),
)
# Its draft model: the same text and vocabulary.
CODE_DRAFT = replace(CODE, name="code-4m", model=Shape(layers=2, hidden_size=256, heads=4, feed_forward=768))

# A target model that does not fit into a cache of 33 MB, not even in int8: code-25m with 12 blocks
# (benchmarks/finetuning.py deepen).
CODE_DEEP = replace(
    CODE,
    name="code-45m",
    init=INIT_MISSING,
    optimizer=replace(CODE.optimizer, learning_rate=5e-4),
    schedule=Schedule(kind="wsd", warmup_steps=20, warmup_share=MOST_WARMUP, final_fraction=0.0, decay_fraction=0.7),
    run=replace(CODE.run, steps=430, validate_every=100, checkpoint_every=100, seed=1),
)

# GPT-2 small (Radford et al. 2019) with the hyperparameters of GPT-3's smallest model (arXiv 2005.14165), as nanoGPT
# trains it: half a million tokens a step.
GPT2_124M = Recipe(
    name="gpt2-124m",
    model=Shape(family="gpt2", layers=12, hidden_size=768, heads=12),
    data=Data(vocab_size=50_257, context=1024, batch_size=16, accumulation=32, workers=2),
    optimizer=Optimizer(learning_rate=6e-4),
    schedule=Schedule(warmup_steps=700, warmup_share=MOST_WARMUP),
    run=Run(steps=20_000, validate_every=250, validation_batches=40, checkpoint_every=250),
)

LLAMA_120M = Recipe(
    name="llama-120m",
    model=Shape(layers=12, hidden_size=768, heads=12, feed_forward=2048),
    data=Data(vocab_size=32_000, context=1024, batch_size=16, accumulation=32, workers=2),
    optimizer=Optimizer(learning_rate=1e-3),
    schedule=Schedule(kind="wsd", warmup_steps=700, warmup_share=MOST_WARMUP, final_fraction=0.0),
    run=Run(steps=20_000, validate_every=250, validation_batches=40, checkpoint_every=250),
)

# nanoGPT's character-level model, on the text of --data.source.
SHAKESPEARE_CHAR = Recipe(
    name="shakespeare-char",
    dropout=0.2,
    model=Shape(family="gpt2", layers=6, hidden_size=384, heads=6),
    data=Data(
        source="shakespeare.txt", tokenizer_kind="character", context=256, batch_size=64, validation_fraction=0.1
    ),
    optimizer=Optimizer(learning_rate=1e-3, beta2=0.99),
    schedule=Schedule(warmup_steps=100, warmup_share=MOST_WARMUP),
    run=Run(steps=5000, validate_every=250, validation_batches=20, checkpoint_every=250),
)

FINETUNE = Recipe(
    name="finetune",
    init=INIT_MISSING,
    data=Data(context=1024, fit_context=True, batch_size=4, accumulation=4, separate_documents=True),
    optimizer=Optimizer(learning_rate=2e-5, weight_decay=0.0),
    schedule=Schedule(warmup_steps=20, warmup_share=MOST_WARMUP, final_fraction=0.0),
    techniques=Techniques(pad_vocabulary_to=1),
    run=Run(epochs=2, validate_every=50, checkpoint_every=50),
)


def as_asked(recipe: Recipe, given: Collection[str]) -> Recipe:
    """Let the given options (`given`, by dotted name) override related settings that the recipe brings along.

    Any of steps, epochs and minutes replaces all limits of the recipe. A given warm-up or context is kept as it is,
    independent of the run's length and of the data.
    """
    run, schedule, data = recipe.run, recipe.schedule, recipe.data
    if any(f"run.{name}" in given and getattr(run, name) is not None for name in LIMITS):
        run = replace(
            run,
            steps=run.steps if "run.steps" in given else None,
            epochs=run.epochs if "run.epochs" in given else None,
            minutes=run.minutes if "run.minutes" in given else None,
        )
    if "schedule.warmup_steps" in given and "schedule.warmup_share" not in given:
        schedule = replace(schedule, warmup_share=1.0)
    if "data.context" in given and "data.fit_context" not in given:
        data = replace(data, fit_context=False)
    return replace(recipe, run=run, schedule=schedule, data=data)


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (DEMO, CODE, CODE_DRAFT, CODE_DEEP, GPT2_124M, LLAMA_120M, SHAKESPEARE_CHAR, FINETUNE)
}

DESCRIPTIONS: dict[str, str] = {
    "demo": "Llama, about 10 M parameters, on Python's own library: minutes on two cores.",
    "code-25m": "Llama, 25 M parameters, on all installed packages: two hours on two cores.",
    "code-4m": "Llama, 4 M parameters, on the same text: drafts for the others.",
    "code-45m": "Llama, 45 M parameters: --init a deepened code-25m (docs/speculation.md).",
    "gpt2-124m": "GPT-2 small from scratch; give a large text with --data.source.",
    "llama-120m": "Llama, 110 M parameters, from scratch; give a large text with --data.source.",
    "shakespeare-char": "A character-level model of 10 M parameters on the file given with --data.source.",
    "finetune": "Continue training a model (--init) on --data.source, which may be a chat .jsonl.",
}
