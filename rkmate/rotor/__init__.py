"""The dynamic programs over a chain of blocks: rk-Rotor and Rotor. No torch."""
