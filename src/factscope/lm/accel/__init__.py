"""GPU acceleration.

Methods call `accelerated`, `accelerated_search` or `static_decode`; the rest is internal:

    device.py        which device, how much memory
    matmul.py        float32 products on half-precision tensor cores
    linear.py        fast linear layers for a model's blocks
    attention.py     attention for rows of a few tokens
    kernels.py       the triton kernels behind both
    graphs.py        CUDA graphs of repeated passes; length buckets
    model_cache.py   fast layers and captured steps cached on a model
    run.py           `accelerated`: the entry point, with the one fallback on overflow
    search.py        `accelerated_search`: steps of the value search
    decode.py        `static_decode`: generation with a static KV cache

bench/ablate.py switches off each part in turn and prints what it saves.
"""

from factscope.lm.accel.device import best_device, free_memory, on_gpu, release_memory
from factscope.lm.accel.graphs import LengthBuckets, can_capture, captured
from factscope.lm.accel.linear import fast_blocks
from factscope.lm.accel.matmul import add_product_
from factscope.lm.accel.run import MIN_BATCH, accelerated
from factscope.lm.accel.search import Step, accelerated_search

__all__ = [
    "MIN_BATCH",
    "LengthBuckets",
    "Step",
    "accelerated",
    "accelerated_search",
    "add_product_",
    "best_device",
    "can_capture",
    "captured",
    "fast_blocks",
    "free_memory",
    "on_gpu",
    "release_memory",
]
