"""Groups of operations of the joint graph that are compiled into kernels of their own."""
