"""What training reads: images, texts, tokenizers, packed rows, and the loader that hands them over.

It may import profiling, and none of layers, workloads or what stands above them.
"""
