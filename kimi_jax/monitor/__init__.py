"""What a run tells people: its metrics file, its console, its report and plots.

Training writes records (`metrics`); `console`, `tensorboard` and `prometheus` show them
as they come, and `report` turns them into a page with plots at any time. Nothing here
knows how the numbers were made.
"""
