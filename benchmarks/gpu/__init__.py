"""What one GPU does: the parts of ``python -m benchmarks gpu``, which ``parts`` describes.

Each part is a generator of the rows of its table. With ``toy`` it goes through the same steps on the CPU with models of
toy size, whose numbers mean nothing.
"""
