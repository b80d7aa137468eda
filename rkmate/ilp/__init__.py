"""Options of a block: the integer program (rk-Checkmate) over a grid of memory budgets.

Rockmate (ICML 2023), section 3.3 and appendix B.
"""
