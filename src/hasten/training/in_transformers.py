"""hasten's attention and loss in other training loops: transformers' Trainer, Accelerate, or your own."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hasten.errors import ConfigError, HastenWarning, ResourceError
from hasten.ops.attention import replace_in
from hasten.ops.loss import IGNORED, linear_cross_entropy


def trainer_callback() -> Any:
    """Create a callback for transformers' Trainer that trains with `accelerated`:

        Trainer(model, arguments, train_dataset=…, callbacks=[hasten.trainer_callback()])

    A Trainer does not call it when training ends by an exception: the model then stays accelerated until the callback
    trains again or is deleted. `with hasten.accelerated(model): trainer.train()` restores it in any case.

    Raises ResourceError without transformers, and when training begins whatever `accelerated` raises.
    """
    try:
        from transformers import TrainerCallback
    except ImportError:
        raise ResourceError("trainer_callback() is for transformers' Trainer: pip install transformers") from None

    class HastenCallback(TrainerCallback):
        def __init__(self) -> None:
            self.entered = ExitStack()

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.entered.close()  # an earlier training may have failed
            self.entered.enter_context(accelerated(kwargs["model"]))

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.entered.close()

    return HastenCallback()


@contextmanager
def accelerated(model: Any) -> Iterator[Any]:
    """Train a transformers language model with hasten's attention and loss, inside the context.

    The loss takes the head's weight and its input, and never creates all logits: with a vocabulary of 128,000 they
    would be most of the memory. In evaluation the model returns its logits as usual; in training `logits` is the head's
    input, so use the model's `loss`. The names of parameters do not change, nor do checkpoints. For one process, DDP,
    and for FSDP2 with the head in the root's unit (`fully_shard` of each layer, then of the model): the loss reads it.

    A model that does more with its logits (Gemma 2 caps them) keeps its own loss, with a HastenWarning; a trial with a
    few tokens finds out. Raises ConfigError for a model without attention of transformers' interface, or whose head is
    not an nn.Linear.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if type(head) is not nn.Linear:
        raise ConfigError(
            f"{type(model).__name__} has no nn.Linear that makes logits; for its attention alone there is "
            "hasten.ops.attention.replace_in"
        )
    attention = model.config._attn_implementation
    replace_in(model)
    try:
        if _only_cross_entropy(model, head):
            with _Loss(model, head).in_place():
                yield model
        else:
            text = f"{type(model).__name__} does more with its logits than a cross entropy: it keeps its own loss"
            warnings.warn(text, HastenWarning, stacklevel=3)
            yield model
    finally:
        model.set_attn_implementation(attention)


@torch.no_grad()
def _only_cross_entropy(model: Any, head: nn.Linear) -> bool:
    """Whether the model's loss is the cross-entropy of its head's output and nothing else, for logits of any size."""
    device, dtype, size = head.weight.device, head.weight.dtype, head.out_features
    tokens = (torch.arange(8, device=device)[None] * 7 + 3) % size
    logits = 30 * torch.randn(1, 8, size, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    expected = nn.functional.cross_entropy(logits[0, :-1].float(), tokens[0, 1:])
    training = model.training
    model.eval()
    head.forward = lambda x: logits  # type: ignore[method-assign, assignment]
    try:
        found = model(input_ids=tokens, labels=tokens).loss
    finally:
        del head.forward
        model.train(training)
    return torch.allclose(found.float(), expected, rtol=1e-4)


class _Loss:
    """The loss function of an accelerated model, whose head returns its input in training.

    transformers calls model.loss_function(logits, labels, …) with the head's output. An object instead of a closure, so
    that a deep copy of the model (such as an average of weights) refers to its own head.
    """

    def __init__(self, model: Any, head: nn.Linear) -> None:
        self.model, self.head, self.theirs = model, head, model.loss_function

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the model's loss function and its head's forward inside the context."""
        before = vars(self.model).get("_loss_function")
        self.model.loss_function = self
        self.head.forward = self.states  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            del self.head.forward
            if before is None:
                del self.model._loss_function
            else:
                self.model.loss_function = before

    @property
    def on(self) -> bool:
        """Whether the model is training, not evaluated."""
        return self.model.training and torch.is_grad_enabled()

    def states(self, x: Tensor) -> Tensor:
        """The head's forward: its input in training, else its logits."""
        return x if self.on else nn.Linear.forward(self.head, x)

    def __call__(self, logits: Tensor, labels: Tensor, vocab_size: int, **options: Any) -> Tensor:
        if not self.on:
            return self.theirs(logits, labels, vocab_size, **options)
        targets, ignored = options.get("shift_labels"), options.get("ignore_index", IGNORED)
        if targets is None:
            targets = nn.functional.pad(labels, (0, 1), value=ignored)[..., 1:]
        targets = torch.where(targets == ignored, IGNORED, targets).to(logits.device)
        total = linear_cross_entropy(logits, self.head.weight, targets, vocab_size=vocab_size, bias=self.head.bias)
        count = options.get("num_items_in_batch")
        return total / ((targets != IGNORED).sum() if count is None else count)
