"""Many runs of one experiment file, and what they show together.

settings     overrides to checked configs, each with an id
state        how far the run of a setting has come
local        runs as processes of this machine, with a live table
emit         the same runs as commands for launchers
table        metrics of many runs as CSV and Markdown, spread over seeds
figures      the same as plots
scaling_law  loss against compute: fits, confidence bands, compute multipliers
"""
