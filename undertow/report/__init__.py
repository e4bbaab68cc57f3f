"""Timelines and costs for readers: text, Perfetto traces, pictures and JSON."""

from undertow.report.reasons import Explanation, Reason, explain, explain_all
from undertow.report.summary import Summary, summarise
from undertow.report.trace import timeline_to_trace

__all__ = [
    "Explanation",
    "Reason",
    "Summary",
    "explain",
    "explain_all",
    "summarise",
    "timeline_to_trace",
]
