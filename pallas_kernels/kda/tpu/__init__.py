"""KDA kernels for TPUs, in Pallas (Mosaic); `kda/mosaic_tpu.py` strings them."""
