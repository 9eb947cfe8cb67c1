"""A run in stages, such as 8K, 64K, 256K and 1M tokens of context.

stages    what a config's get_stages() says, as one checked config a stage
criteria  whether a stage may be left, from its evaluations
driver    the training loop once a stage, and the hand-over between them
report    which stages there were, and why the run went on
"""
