"""Regions of the joint graph that run a few rows at a time."""
