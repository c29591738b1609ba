"""What all layers that keep a state of each sequence compute with: groups of sequences, a causal convolution.

`causal_convolution` mixes a token with the few before it. Sequences of a step with equally many tokens are a
`SequenceGroup`, computed together. A kernel that goes from state to state itself takes a `StateView`.
"""

from hasten.ops.states.convolution import causal_convolution
from hasten.ops.states.groups import SequenceGroup, group_sequences, in_groups
from hasten.ops.states.view import State, StateView

__all__ = ["SequenceGroup", "State", "StateView", "causal_convolution", "group_sequences", "in_groups"]
