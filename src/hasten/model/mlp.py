"""The feed-forward layer of a block."""

from torch import Tensor, nn

from hasten.model.activations import activation_of
from hasten.model.config import ModelConfig
from hasten.ops.linear import PackedLinear

Linear = nn.Linear | PackedLinear  # a quantized or packed layer may replace a plain one


class MLP(nn.Module):
    """down(act(up x)), or gated: down(act(gate x) · up x) (arXiv 2002.05202).

    size: inner features. width: those that it reads and returns, by default the stream's.
    """

    def __init__(self, config: ModelConfig, size: int, width: int | None = None) -> None:
        super().__init__()
        width = config.hidden_size if width is None else width
        self.gate: Linear | None = None
        if config.gated:
            self.gate = nn.Linear(width, size, bias=config.mlp_bias)
        self.up: Linear = nn.Linear(width, size, bias=config.mlp_bias)
        self.down: Linear = nn.Linear(size, width, bias=config.mlp_bias)
        self.activation_name = config.activation
        self.activation = activation_of(config.activation)
        self.limit, self.up_offset = config.swiglu_limit, config.up_offset

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        return self.down(self.gated(self.gate(x), self.up(x)))

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """act(gate)·up, after the limits and with the offset that the model has."""
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self.activation(gate) * (up + self.up_offset if self.up_offset else up)
