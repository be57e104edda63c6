"""Acceleration on a GPU: fast linear layers, attention kernels, CUDA graphs, static decoding."""
