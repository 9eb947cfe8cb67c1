"""From text on disk to batches: nothing here knows of models or devices.

sources          what a user names, to shards of documents
formats          one file to documents
shakespeare      the default corpus
tokenizer        what a tokenizer is; bytes and 16 specials
tokenizer_files  tokenizer.json and tiktoken files
build_store      tokenise a source once, resumably
store            the flat token stream on disk
images           image files to patches
media            documents with images in them
media_sources    what a user names, to such documents
words            pictures of numbers, drawn on the spot
documents        documents of a token store: held out or not, and by length
packing          which pieces of which documents share a window
windows          windows by index
mixture          which part of the data each row of a run comes from
parts            sources and strata to the parts of a mixture
permutation      orders and draws that can be evaluated at any index
loader           batches by step, read-ahead
statistics       the figures of the data, before a run starts
"""
