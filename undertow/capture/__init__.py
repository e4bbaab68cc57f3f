"""From a model to one FX graph of its whole training step, parallelised, without its hardware."""
