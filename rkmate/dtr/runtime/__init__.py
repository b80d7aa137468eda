"""The online runtime: rematerialization of a PyTorch program while it runs."""
