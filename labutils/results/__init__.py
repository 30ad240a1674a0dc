"""What was found and what it says: records, claims, judges, the report.

It may import recipe.
"""
