"""Weights in fewer bits: the mathematics, our frozen layers, and the layer kinds of other libraries
behind one call.

fp8_math    what an 8-bit floating-point number is, and the scales that bring tensors into its range
fp8_linear  a frozen linear layer that holds its weight once, in FP8
nf4_linear  the same with QLoRA's bytes, unpacked inside the compiled graph
convert     puts one of the layer kinds in the place of a model's frozen linear layers
"""
