"""Scenarios from the field, a module for each subject. `field.py` collects and runs them."""
