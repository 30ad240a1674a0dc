"""The techniques, one a file: what a model is built of or changed by.

It may import profiling and recipe.
"""
