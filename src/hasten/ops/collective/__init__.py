"""Sums and pieces exchanged between the ranks that hold one model together."""

from hasten.ops.collective.group import RankGroup as RankGroup
