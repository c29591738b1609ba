"""Speculative decoding: proposers, what a step costs, and how many tokens to propose."""

from hasten.generation.speculation.build import make_speculator, small_model
from hasten.generation.speculation.cost import StepCost, measure_step_cost
from hasten.generation.speculation.draft_model import DraftModel
from hasten.generation.speculation.proposer import Accept, Draft, Proposer, Text
from hasten.generation.speculation.speculator import PLAIN_STEPS, SpeculationStats, Speculator
from hasten.generation.speculation.suffix import SuffixProposer

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
