"""The codec's loops, compiled by numba for the CPU: the same bytes as the definitions in PyTorch and numpy.

A kernel reads each value of a tensor once and takes all steps while the chunk is in the processor's cache. Each works
on a range of chunks, outside of the interpreter's lock, and a plain thread pool gives out the ranges: numba's own pool
ends the process when two of our threads meet in it. No kernel is compiled with fast maths, so products and sums are
rounded one by one, as in the definitions. Callers import kernels where they call them; kernels import no caller.
"""
