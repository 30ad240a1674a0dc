"""Experiments that are too long for a cell, one module a lab, named after the lab.

It may import every room but tools.
"""
