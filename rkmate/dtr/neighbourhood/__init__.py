"""Evicted neighbourhoods: what an eviction would add to later rematerializations."""

from rkmate.dtr.neighbourhood.classes import EvictedClasses
from rkmate.dtr.neighbourhood.none import NoNeighbourhood
from rkmate.dtr.neighbourhood.regions import EvictedRegions
from rkmate.dtr.neighbourhood.tracker import Tracker

__all__ = ["EvictedClasses", "EvictedRegions", "NoNeighbourhood", "Tracker"]
