"""What a notebook calls: the lab, its parameters, exercises, predictions, plots and tables.

It may import training, profiling, results and recipe.
"""
