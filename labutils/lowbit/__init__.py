"""Weights in fewer bits: the mathematics, our frozen FP8 layer, and the layer kinds of other libraries behind one call.

fp8        what an 8-bit floating-point number is, and the scales that bring tensors into its range
frozen     a frozen linear layer that holds its weight once, in FP8
backends   `convert_base`: put one of the layer kinds in the place of a model's frozen linear layers
"""
