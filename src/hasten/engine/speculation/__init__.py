"""Speculative decoding: proposers, and the rule for how many tokens to propose."""

from hasten.engine.speculation.build import make_speculator, small_model
from hasten.engine.speculation.draft_model import DraftModel
from hasten.engine.speculation.multi_token import MultiTokenDraft
from hasten.engine.speculation.price import Price
from hasten.engine.speculation.proposer import Accept, Draft, Proposer, ReadsStates, Text
from hasten.engine.speculation.speculator import SpeculationStats, Speculator
from hasten.engine.speculation.suffix import SuffixProposer

__all__ = [
    "Accept",
    "Draft",
    "DraftModel",
    "MultiTokenDraft",
    "Price",
    "Proposer",
    "ReadsStates",
    "SpeculationStats",
    "Speculator",
    "SuffixProposer",
    "Text",
    "make_speculator",
    "small_model",
]
