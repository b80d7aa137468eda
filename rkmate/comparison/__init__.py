"""Compare all planners on one model at equal budgets, in one table and one picture."""
