"""Predicted gains against measured ones on the course's own loop, under the name that lab 10 has
for it. It is no part of the command, and lives beside this room.
"""

from labutils.tools.ablations import ablations, fix_table

__all__ = ["ablations", "fix_table"]
