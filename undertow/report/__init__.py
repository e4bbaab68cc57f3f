"""Timelines and costs for readers: text, Perfetto traces and JSON."""
