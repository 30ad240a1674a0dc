"""How training is measured: step times, memory, utilisation, traces."""
