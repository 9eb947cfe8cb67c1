"""From text on disk to batches: nothing here knows of models or devices.

corpus      local files, or the default corpus, to documents; the validation split
tokenizer   bytes and 16 specials
windows     packed windows and the order of an epoch, both by index
loader      batches by step, read-ahead, the figures of a corpus
"""
