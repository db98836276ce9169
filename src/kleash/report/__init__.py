"""Run folders -> pages. Reads files only; never loads a model."""

from kleash.report.dial import write_dial
from kleash.report.lab import write_lab_report
from kleash.report.page import write_report
from kleash.report.table import Entry, final_table

__all__ = ["Entry", "final_table", "write_dial", "write_lab_report", "write_report"]
