"""`train`: runs a recipe to a model folder, and resumes where an earlier run stopped."""

import shutil
import signal
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, get_args

import torch

from hasten.checkpoints.adapter_files import save_adapter
from hasten.checkpoints.export import export_model
from hasten.distributed.launch import joined, remember, remembered
from hasten.distributed.placement import Placement
from hasten.distributed.ranks import Ranks
from hasten.errors import ConfigError
from hasten.machine import measured, resolve_dtype
from hasten.machine.files import code_digest, locked, save_json
from hasten.model.initialize import initialize, unfilled
from hasten.model.lora import attached
from hasten.model.transformer import Transformer
from hasten.model.vocabulary import pad_vocabulary
from hasten.quantization.qat import as_stored
from hasten.quantization.report import stored_weights
from hasten.training import checkpoints, display
from hasten.training.build import apply_lora, pretrained_model
from hasten.training.checkpoint_state import TrainingState
from hasten.training.journal import read
from hasten.training.loop import Loop, OnStep, StopRequest, stop_on_signals
from hasten.training.qat import apply_rounding
from hasten.training.recipe import Recipe, flat
from hasten.training.recipes import INIT_MISSING, RECIPES
from hasten.training.run_folder import Resume, RunFolder, find_start, write_error, writing
from hasten.training.setup import Setup, set_up


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """The result of a run.

    folder: runs/NAME. model_folder: the Hugging Face folder in it; with LoRA the adapter's. loss, validation_loss: of
    the last step (nats). best_step: step with the lowest validation loss. tokens_per_second, mfu: medians over the
    steps. seconds: wall time. precision: {dtype, reason} of the matrix products. measured: times by which kernels were
    chosen, if any. stopped_by: number of the signal that ended the run early, which then wrote no model folder; None if
    it finished. bits_per_weight: of a model trained with rounded weights, counting all its files; else None.
    """

    folder: Path
    model_folder: Path
    steps: int
    total_steps: int | None
    loss: float | None
    validation_loss: float | None
    best_validation_loss: float | None
    best_step: int | None
    tokens: int
    tokens_per_second: float | None
    mfu: float | None
    seconds: float
    precision: dict[str, str]
    measured: dict[str, dict[str, float]]
    spikes: int
    stopped_by: int | None
    bits_per_weight: float | None

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {name: str(v) if isinstance(v, Path) else v for name, v in asdict(self).items()}


def train(
    recipe: Recipe, *, progress: bool = True, resume: Resume = "auto", on_step: OnStep | None = None
) -> TrainResult:
    """Train a recipe in runs/NAME; writes `model/`, `train.jsonl`, `loss.png` and `checkpoints/` there.

    resume: "auto" continues from the last checkpoint if there is one, "never" starts over, "must" requires one. A
    resumed run computes what an uninterrupted run would have computed, on the CPU bit for bit if `run.threads` is a
    number. progress: show a bar on standard error. on_step: called with each line of train.jsonl. SIGINT and SIGTERM
    save and end the run (`stopped_by`).

    In a process started by torchrun all ranks train together and share the folder; the first one writes and prints. An
    error of any rank is raised by the first one and names the rank.

    Raises ConfigError for an invalid recipe, for one that differs from the run in the folder, and if another process is
    training there; DataError for its text, ResourceError if memory or disk do not suffice, TrainingError if the loss is
    not finite, CheckpointError for a damaged checkpoint.
    """
    with joined() as ranks:
        check_asked(recipe, resume)
        ranks = ranks.split(recipe.parallel.tensor)
        folder = RunFolder(path=Path(recipe.run.folder).expanduser() / recipe.name)
        if resume == "never" and remembered(f"begun {folder.path}"):
            resume = "auto"  # a previous attempt of this launch has already started over; the checkpoints are its own
        with _alone(folder) if ranks.first else nullcontext():
            return _train(recipe, folder, ranks, progress=progress and ranks.first, resume=resume, on_step=on_step)


def check_asked(recipe: Recipe, resume: Resume) -> None:
    """Raise ConfigError for what `train` cannot be asked for."""
    if not isinstance(recipe, Recipe):
        raise ConfigError(
            f"train() takes a hasten.training.Recipe, and was given {recipe!r} ({type(recipe).__name__}); those that "
            f"come with hasten are hasten.training.RECIPES[name], name one of {', '.join(RECIPES)}"
        )
    if resume not in get_args(Resume):
        raise ConfigError(f"resume is {resume!r}; choose one of {', '.join(map(repr, get_args(Resume)))}")
    recipe.check()
    if recipe.init == INIT_MISSING and not Path(INIT_MISSING).exists():
        raise ConfigError(
            f"recipe {recipe.name!r} starts from a model, and none is given: add --init MODEL, a model folder or a hub "
            "id"
        )


def _alone(folder: RunFolder) -> AbstractContextManager[object]:
    """Lock the folder. Raises ConfigError if another process holds the lock."""
    from filelock import Timeout

    try:
        return locked(folder.lock, waiting=None)
    except Timeout:
        raise ConfigError(
            f"another process is training in {folder.path}; wait until it has ended, or give this run another --name"
        ) from None
    except OSError as error:
        raise write_error(folder.path, error) from None


def _train(
    recipe: Recipe, folder: RunFolder, ranks: Ranks, *, progress: bool, resume: Resume, on_step: OnStep | None
) -> TrainResult:
    stored = find_start(folder, recipe, resume)
    if ranks.size > 1:
        at = "none" if stored is None else f"of step {stored.step}"
        fields = {name: str(value) for name, value in flat(recipe).items()}
        ranks.require_same({"version of hasten's code": code_digest(), **fields, "checkpoint": at})
    if stored is not None:
        measured.adopt(stored.measured)
        if recipe.run.fit:  # keep the micro-batches that the run began with
            cut = stored.recipe.data
            data = replace(recipe.data, batch_size=cut.batch_size, accumulation=cut.accumulation)
            recipe = replace(recipe, data=data, run=replace(recipe.run, fit=False))
    stop = StopRequest()
    # Before the first step there is nothing to save: Ctrl-C ends the process at once. Several ranks stop together,
    # between two steps, a single process also within a step.
    asked = stop.asked if ranks.size == 1 else lambda: False
    begun = None if stored is None else stored.recipe
    setup = set_up(recipe, progress=progress, ranks=ranks, should_stop=asked, begun=begun)
    recipe = setup.recipe
    state = TrainingState() if stored is None else _restore(stored, setup, folder)
    if ranks.first:
        _begin_folder(folder, recipe, fresh=stored is None)
        remember(f"begun {folder.path}")
    with stop_on_signals(stop):
        with display.progress_bar(recipe.name, shown=progress) as bar:
            bar.note(f"matrix products in {setup.precision}")
            for note in setup.notes:
                bar.note(note)
            if setup.step.how:
                bar.note(setup.step.how)
            loop = Loop(recipe, folder, setup, state, stop=stop, progress=bar, on_step=on_step)
            finished = loop.run()
        bits = _export(recipe, folder, setup) if finished and ranks.first else None
    lines = read(folder.journal)
    if lines and ranks.first:
        title = f"{recipe.name}: {state.tokens:,} tokens"
        if recipe.teacher is not None:
            title += "; training loss: divergence from the teacher"
        display.draw_losses(lines, folder.picture, title=title)
    return TrainResult(
        folder=folder.path,
        model_folder=folder.adapter if recipe.lora.rank and not recipe.qat.bits else folder.model,
        steps=state.step,
        total_steps=state.total,
        loss=state.loss,
        validation_loss=state.validation_loss,
        best_validation_loss=state.best_loss,
        best_step=state.best_step,
        tokens=state.tokens,
        tokens_per_second=_median(lines, "tokens_per_second"),
        mfu=_median(lines, "mfu"),
        seconds=state.seconds,
        precision=setup.precision.to_json(),
        measured=measured.known(),
        spikes=state.spikes,
        stopped_by=None if finished else stop.signal or signal.SIGTERM,  # another rank may have received the signal
        bits_per_weight=bits,
    )


def _begin_folder(folder: RunFolder, recipe: Recipe, *, fresh: bool) -> None:
    with writing(folder.path):
        folder.path.mkdir(parents=True, exist_ok=True)
        if fresh:
            for old in (folder.path / "checkpoints", folder.tensorboard):
                if old.exists():
                    shutil.rmtree(old)
        save_json(folder.recipe, recipe.to_json())


def _restore(stored: checkpoints.Checkpoint, setup: Setup, folder: RunFolder) -> TrainingState:
    if stored.data != setup.data.folder.name:
        raise ConfigError(
            f"the text has changed since {stored.folder} was written (tokens {setup.data.folder.name}, then "
            f"{stored.data}): restore the old text, or start over with --resume never"
        )
    state = stored.progress
    checkpoints.load(stored, placement=setup.step.where, optimizer=setup.step.optimizer, device=setup.step.device)
    setup.step.precision.load(stored.scaler)
    if state.best_step == state.step and stored.folder == folder.last and setup.step.ranks.first:
        checkpoints.link(folder.last, folder.best)  # in case the run was killed between writing the two
    return state


def _export(recipe: Recipe, folder: RunFolder, setup: Setup) -> float | None:
    """Write the model or adapter folder, from the best weights if they are stored and wanted, else the last ones.

    What ranks divide is read from a checkpoint. Returns the stored bits per weight of a model trained while rounded.
    """
    # While bits are lowered, an earlier loss says nothing about the final ones.
    wanted = recipe.run.export == "best" and recipe.qat.start_bits is None
    stored = checkpoints.find(folder.best) if wanted else None
    model, placement, read = setup.model, setup.step.where, None
    if not placement.has_whole_model:
        stored = stored or checkpoints.find(folder.last)
        if recipe.qat.bits is not None:
            model = _rounded_model(recipe, setup.model)
        else:
            with unfilled():
                model = Transformer(setup.model.config).to(setup.model.dtype)
        model.tokenizer, model.generation = setup.model.tokenizer, setup.model.generation
        if recipe.qat.bits is None and recipe.lora.rank is None:  # its weights are read as they are written
            assert stored is not None
            if setup.model.head.weight is not setup.model.embedding.weight:  # whatever the config says
                model.head.weight = torch.nn.Parameter(torch.empty_like(model.head.weight))
            read = checkpoints.reader_of_weights(stored, dict(model.named_parameters()))
        else:
            if recipe.qat.bits is None:  # of an adapter's model, frozen weights are not written
                trained = next(iter(placement.parameters.values()))
                apply_lora(model, recipe.lora, seed=0, dtype=trained.dtype, device="cpu")
            placement = Placement(model)
    if stored is not None and read is None:
        checkpoints.load_weights(stored, placement)
    model.eval()
    dtype = None if recipe.run.export_dtype == "auto" else resolve_dtype(recipe.run.export_dtype)
    if recipe.qat.bits is not None:
        export_model(model, folder.model, dtype=dtype, quantized=as_stored(model))
        stored_bytes = sum(file.stat().st_size for file in folder.model.glob("*.safetensors"))
        return 8 * stored_bytes / sum(weight.numel() for weight in stored_weights(model).values())
    if recipe.lora.rank is not None:
        adapter = attached(model)
        dtype = dtype or torch.float32
        adapter = {name: replace(own, a=own.a.to(dtype), b=own.b.to(dtype)) for name, own in adapter.items()}
        save_adapter(folder.adapter, adapter, model.config, base=recipe.init, dropout=recipe.lora.dropout)
    else:
        if dtype is None and recipe.techniques.precision == "bfloat16":
            dtype = torch.bfloat16
        export_model(model, folder.model, dtype=dtype, read=read)
    return None


def _rounded_model(recipe: Recipe, trained: Transformer) -> Transformer:
    """The model with its rounding layers, whole and on the host; what was trained is yet to be read into it."""
    if recipe.init is None:
        model = initialize(trained.config, seed=recipe.run.seed)
    else:
        model = pretrained_model(recipe.init, recipe, device=torch.device("cpu"))
    if recipe.lora.rank is not None:
        apply_lora(model, recipe.lora, seed=0)
    else:
        pad_vocabulary(model, recipe.techniques.pad_vocabulary_to)
    apply_rounding(model, recipe.qat, begin=False)
    return model


def _median(lines: list[dict[str, Any]], name: str) -> float | None:
    values = [line[name] for line in lines if line.get(name) is not None]
    return median(values) if values else None
