"""What time and memory cost: measured, and predicted from data sheets and a host's delays.

It may import results and recipe, and nothing above them.
"""
