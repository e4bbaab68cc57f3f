"""Models written plainly in PyTorch, for planning, demonstrations and tests.

Each file has `SIZES`, `build(size)`, `example_inputs(model, batch, seq)`, `default_seq(model)` and
`loss_fn`; what undertow expects of a file of yours is told in `undertow/capture/models.py`.
"""
