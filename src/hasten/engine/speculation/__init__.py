"""Speculative decoding: proposers, what a step costs, and how many tokens to propose."""

from hasten.engine.speculation.build import make_speculator, small_model
from hasten.engine.speculation.cost import StepCost, measure_step_cost
from hasten.engine.speculation.draft_model import DraftModel
from hasten.engine.speculation.proposer import Accept, Draft, Proposer, Text
from hasten.engine.speculation.speculator import PLAIN_STEPS, SpeculationStats, Speculator
from hasten.engine.speculation.suffix import SuffixProposer

__all__ = [
    "PLAIN_STEPS",
    "Accept",
    "Draft",
    "DraftModel",
    "Proposer",
    "SpeculationStats",
    "Speculator",
    "StepCost",
    "SuffixProposer",
    "Text",
    "make_speculator",
    "measure_step_cost",
    "small_model",
]
