"""The package's own operators, by subject: what each computes, and its record. They are defined once one of
the modules is imported; a generated step may call any of them.
"""

from rkmate.graph.ops import collectives, embeddings, losses, norms, products

__all__ = ["collectives", "embeddings", "losses", "norms", "products"]
