"""SGLang's own engine serving a tiny DeepSeek-V4 in the unified_kv layout, on any torch device.

Torch functions stand in for the GPU-only kernels; everything else is SGLang. Selected by
``SGLANG_UNIFIED_KV_REFERENCE_ENGINE=1`` and by nothing else; for tests and the demo.
"""
