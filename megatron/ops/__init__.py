"""Operators, a module each: schema, reference, shapes and gradient. Kernels only add speed."""
