"""What the scripts run in forked processes have in common."""

ON = {"SGLANG_UNIFIED_KV_BIT_EXACT_HICACHE": "1"}
LOAD = "from sglang.srt.plugins import load_plugins; load_plugins()\n"
