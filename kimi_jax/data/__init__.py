"""From text on disk to batches: nothing here knows of models or devices.

corpus       local files, or the default corpus, to documents
tokenizer    bytes and 16 specials
documents    documents of a token store: held out or not, and by length
packing      which pieces of which documents share a window
windows      windows by index
mixture      which part of the data each row of a run comes from
parts        sources and strata to the parts of a mixture
permutation  orders and draws that can be evaluated at any index
loader       batches by step, read-ahead
statistics   the figures of the data, before a run starts
"""
