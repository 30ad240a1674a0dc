"""GPU Fine-Tuning Lab: what the notebooks call. Heavy libraries are imported where they are used."""

__version__ = "0.1.0"
