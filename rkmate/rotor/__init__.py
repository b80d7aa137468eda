"""The dynamic programs over a chain of blocks: rk-Rotor and Rotor. No torch."""

from rkmate.ir.chain import (
    Backward,
    Block,
    Chain,
    Forward,
    ForwardPlain,
    Op,
    Option,
)
from rkmate.rotor.replay import Cost, replay
from rkmate.rotor.rk_rotor import Table, fastest, least, minimum, solve
from rkmate.rotor.rotor import RotorChain, rotor

__all__ = [
    "Backward",
    "Block",
    "Chain",
    "Cost",
    "Forward",
    "ForwardPlain",
    "Op",
    "Option",
    "RotorChain",
    "Table",
    "fastest",
    "least",
    "minimum",
    "replay",
    "rotor",
    "solve",
]
