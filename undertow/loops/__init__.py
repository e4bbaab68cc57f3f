"""ATen graphs as loop nests: lowering, dependencies, fusion into kernels."""
