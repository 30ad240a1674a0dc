"""Weights in fewer bits: the mathematics, our frozen layers, and the layer kinds of other libraries
behind one call.

fp8        what an 8-bit floating-point number is, and the scales that bring tensors into its range
nf4        whole numbers, blocks, NF4 and double quantisation: what QLoRA stores
frozen     a frozen linear layer that holds its weight once, in FP8
frozen4    the same with QLoRA's bytes, unpacked inside the compiled graph
survey     what quantising costs a model, layer by layer
backends   `convert_base`: put one of the layer kinds in the place of a model's frozen linear layers
"""
