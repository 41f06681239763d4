"""Tests of `glassblock.reports`; `report_makers` builds the reports they render."""
