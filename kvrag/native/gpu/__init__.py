"""The kernels for NVIDIA GPUs, in ``cuda/triton``: begin with `tiled.py`, which starts them.

`rows.py` has those of a decoder layer. Arguments are torch tensors on one GPU, work goes to torch's
current stream, and nothing waits for the device.
"""
