"""Undertow hides the communication of distributed PyTorch training behind its compute."""

__version__ = "0.1.0"
