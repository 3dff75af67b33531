"""Edits of SGLang: what one is, and what it expects of the SGLang that is installed."""
