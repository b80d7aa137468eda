"""The dynamic program over a chain of blocks: rk-Rotor; Rotor is its case of one option a block. No torch."""
