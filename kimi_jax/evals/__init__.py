"""What a model can do: generated tasks, held-out text, speed; and how runs compare.

score      answers of instances by teacher-forced passes
cells      what is measured, checked before anything runs
measure    the measurement of one cell
run        all cells, one file each, resumed where it stopped
report     tables and plots of one run; `compare` of several
harness    lm-evaluation-harness's interface to a model
"""
