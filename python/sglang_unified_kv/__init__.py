"""Exact, larger and faster prefix reuse of DeepSeek-V4 on SGLang's ``unified_kv`` backend."""
