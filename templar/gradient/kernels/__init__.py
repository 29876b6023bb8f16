"""The codec's loops, compiled by numba for the CPU: the same bytes as the PyTorch definitions beside them.

A kernel reads each value of a tensor once and does all it can while the chunk is in the processor's cache. None of them
starts threads of its own (numba's pool ends the process when two of ours meet in it): each works on a range of chunks,
outside of the interpreter's lock, and a plain thread pool gives out the ranges. No kernel is compiled with fast maths,
so products and sums are rounded one by one, as in the definitions.
"""
