"""What the command line runs: labs in batches, the doctor, handouts, diagnoses.

It may import every room but labs.
"""
