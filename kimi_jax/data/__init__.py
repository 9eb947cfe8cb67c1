"""From text on disk to batches: nothing here knows of models or devices.

sources          what a user names, to shards of documents
formats          one file to documents
shakespeare      the default corpus
tokenizer        what a tokenizer is; bytes and 16 specials
tokenizer_files  tokenizer.json and tiktoken files
build_store      tokenise a source once, resumably
store            the flat token stream on disk, and its documents
split            which documents are held out
windows          packed windows and the order of an epoch, both by index
loader           batches by step, read-ahead, the figures of a corpus
"""
