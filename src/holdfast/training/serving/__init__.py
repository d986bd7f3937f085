"""Servers of vLLM that sample from the policy: reached, pushed to, and proved."""
