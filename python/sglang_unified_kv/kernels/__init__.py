"""Triton kernels that move rows between rings, chunks and staged records. Import torch and triton only.

What each kernel does is written once more in torch in ``checkpoint/rows.py``, which also runs on the CPU.
"""
