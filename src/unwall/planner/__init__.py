"""What fits, where it goes, how fast it will be: memory and bandwidth formulas, models and machines as descriptions."""
